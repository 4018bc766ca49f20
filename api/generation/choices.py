"""One sequence of a request as its tokens come in: text, log-probabilities, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ...core.errors import EngineFailure
from ...core.messages import Generate, SequenceOutput, TokenLogprobs
from ...core.text.detokenizer import Detokenizer
from ...core.text.tokenizer import Tokenizer
from ..errors import ApiError
from ..protocol.generation import FinishReason
from ..tools.parser import Call, CallPiece, ToolParser
from .guidance import UNGUIDED, Guidance
from .logprobs import Entry
from .prompts import Prompt


class Delta(msgspec.Struct, frozen=True):
    """What became certain with one output: text that can be sent, and the entries of the tokens it is made
    of.
    """

    text: str
    entries: list[Entry]
    calls: Sequence[CallPiece] = ()
    """What is new of tool calls."""


@dataclass(eq=False)
class Choice:
    """One answer in the making."""

    index: int
    prompt: Prompt
    command: Generate
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    base_offset: int = 0
    """Characters in front of the generated text (an echoed prompt)."""
    guidance: Guidance = UNGUIDED
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._used = 0
        self._detokenizer = Detokenizer(
            self.tokenizer,
            self.prompt.token_ids,
            self.command.params,
            self.eos_token_ids,
            self.guidance.kept,
        )
        self._parser = self.guidance.parser()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, output: SequenceOutput) -> Delta:
        """Add what one step brought. Where a stop string, or the one tool call that was wanted, ends the
        answer before the engine does, `finished` says so.

        Raises `EngineFailure` where the sequence ended with an error.
        """
        if output.error is not None:
            raise EngineFailure(output.error)
        if output.finish_reason == "abort":
            raise ApiError("internal_error", "the request was aborted")
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs or []
        over = output.finish_reason is not None
        by_token = output.stop_token_id is not None
        delta = self._detokenizer.add(output.token_ids, over, drop_last=by_token)
        if delta.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", delta.stopped
        elif over:
            self.finish_reason = "stop" if output.finish_reason == "stop" else "length"
            if by_token and output.stop_token_id not in self.eos_token_ids:
                self.stop_reason = output.stop_token_id
        text = delta.text
        calls: Sequence[CallPiece] = ()
        if self._parser is not None:
            text, calls = self._parsed(self._parser, text)
        self.completion_tokens = delta.tokens_used if self.finished else len(self._token_ids)
        return self._certain(text, calls, delta.tokens_used)

    @property
    def calls(self) -> Sequence[Call]:
        """Tool calls so far."""
        return () if self._parser is None else self._parser.calls

    def _parsed(self, parser: ToolParser, text: str) -> tuple[str, Sequence[CallPiece]]:
        """Text and calls in what has come; where there are calls an answer ends with that reason."""
        parsed = parser.feed(text)
        if parser.full and not self.finished:
            self.finish_reason = "tool_calls"
        if self.finished:
            parsed.add(parser.finish())
        if parser.calls and self.finish_reason == "stop" and not self._is_cut(parser.calls[-1]):
            self.finish_reason = "tool_calls"
        return parsed.text, parsed.pieces

    def _is_cut(self, call: Call) -> bool:
        """Whether what the caller stops at came within the call."""
        if self.stop_reason is None:
            return False
        try:
            msgspec.json.decode(call.arguments)
        except msgspec.DecodeError:
            return True
        return False

    def _certain(self, text: str, calls: Sequence[CallPiece], used: int) -> Delta:
        entries: list[Entry] = []
        if self._logprobs:
            texts = self._detokenizer.token_texts(self._used, used)
            entries = [
                Entry(self._token_ids[index], self.base_offset + token.offset, self._logprobs[index])
                for index, token in enumerate(texts, start=self._used)
            ]
        self._used = used
        self.text += text
        self.entries += entries
        return Delta(text, entries, calls)

    def forget(self) -> None:
        """Let go of what it is made of, once it has been written; the counts stay."""
        self.entries, self.prompt_logprobs, self._logprobs, self._token_ids = [], [], [], []

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by; needs log-probabilities."""
        used = self._logprobs[: self.completion_tokens]
        return sum(entry.logprob for entry in used) / max(1, len(used))
