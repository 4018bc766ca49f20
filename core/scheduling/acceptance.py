"""Whether a sequence is taken at all: what can never be served is refused at once. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...lora.residency import Residency
from ..messages import EngineError, Generate
from .sequence import Sequence


@dataclass(frozen=True)
class Acceptance:
    """The limits of one engine."""

    residency: Residency
    block_size: int
    max_model_len: int

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def accept(self, command: Generate, arrival: int) -> Sequence | EngineError:
        """A sequence that fits the context, and the pool with its adapters beside all pins; or why it does
        not."""
        prompt, asked = command.prompt_token_ids, command.params.max_tokens
        if not prompt:
            return EngineError("invalid_request", "the prompt must not be empty", "prompt")
        digests = tuple(use.digest for use in command.adapters)
        refusal = self.residency.refusal(digests)
        if refusal is not None:
            return EngineError(refusal.code, str(refusal), "adapter")
        room = self.room(digests)
        left = min(self.max_model_len, room) - len(prompt)
        open_ended = asked is None or (command.shorten and asked > left)
        max_tokens = left if asked is None or open_ended else asked
        least = 1 if open_ended else max_tokens
        error = self._beyond_context(len(prompt), least) or self._beyond_pool(len(prompt), least, room)
        if error is not None:
            return error
        return Sequence(
            key=command.key,
            group=command.group,
            prompt_token_ids=list(prompt),
            params=command.params,
            adapters=tuple(command.adapters),
            tenant=command.tenant,
            arrival=arrival,
            max_tokens=max_tokens,
            open_ended=open_ended,
            prompt_logprobs=None if command.params.prompt_logprobs is None else [None],
        )

    def room(self, digests: Iterable[str]) -> int:
        """Tokens that one sequence alone can have beside these adapters and all pinned ones."""
        return self.residency.room(digests) * self.block_size

    def promised(self, sequence: Sequence) -> int:
        """Blocks promised to a sequence: all it may use; to an open-ended one, its prompt and one token."""
        tokens = 1 if sequence.open_ended else sequence.max_tokens
        return self.blocks(len(sequence.prompt_token_ids) + tokens)

    def _beyond_context(self, prompt: int, generated: int) -> EngineError | None:
        limit = self.max_model_len
        if prompt + min(generated, 1) > limit:
            return EngineError(
                "context_length_exceeded",
                f"the prompt has {prompt} tokens; the context holds {limit}, the answer included",
                "prompt",
            )
        if prompt + generated > limit:
            return EngineError(
                "context_length_exceeded",
                f"the prompt's {prompt} tokens and {generated} to generate exceed the context of {limit}",
                "max_tokens",
            )
        return None

    def _beyond_pool(self, prompt: int, generated: int, room: int) -> EngineError | None:
        if prompt + generated <= room:
            return None
        return EngineError(
            "capacity_exceeded",
            f"the prompt's {prompt} tokens and {generated} to generate need more memory than there is: "
            f"beside adapters there is room for {room} tokens",
            "prompt" if prompt + min(generated, 1) > room else "max_tokens",
        )
