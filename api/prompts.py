"""Prompts: texts and conversations to token ids, checked against the vocabulary, in worker threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.text.chat_template import ChatTemplateError
from ..core.text.tokenizer import Tokenizer
from .errors import invalid
from .protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from .workers import Workers

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""OpenAI's. A template that has its own opinion about roles is heard first."""


@dataclass(frozen=True)
class Prompt:
    """One prompt as the engine takes it."""

    token_ids: list[int]
    text: str | None = None
    """As the client sent it, or as its token ids read, special tokens included; None where nobody will ask.
    """


class Prompts:
    """Of one base."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_model_len: int, workers: Workers) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._text = workers.text

    async def of_completion(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool, with_text: bool
    ) -> list[Prompt]:
        """Raises `invalid_request` for a prompt without tokens or with ids outside the vocabulary."""
        return await self._text(self._encode_all, prompts, add_special_tokens, with_text)

    async def of_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None,
        template_kwargs: dict[str, Any] | None,
    ) -> Prompt:
        """Raises `ChatTemplateError` with the template's own words where it refuses the messages."""
        return await self._text(self._encode_chat, messages, add_generation_prompt, template_kwargs)

    async def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if body.messages is not None:
            prompt = await self.of_chat(body.messages, body.add_generation_prompt, body.chat_template_kwargs)
            ids = prompt.token_ids
        else:
            ids = await self._text(
                self._tokenizer.encode, body.prompt or "", body.add_special_tokens is not False
            )
        texts = None
        if body.return_token_strs:
            texts = await self._text(lambda: [self._tokenizer.token_text(id) for id in ids])
        return TokenizeResponse(len(ids), self._max_model_len, ids, texts)

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        self._check(body.tokens, "tokens")
        text = await self._text(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(text)

    def _encode_all(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool, with_text: bool
    ) -> list[Prompt]:
        result = []
        for prompt in prompts:
            ids = self._tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            self._check(ids, "prompt")
            if not ids:
                raise invalid("prompt must not be empty", "prompt")
            if not with_text:
                text = None
            elif isinstance(prompt, str):
                text = prompt
            else:
                text = self._tokenizer.decode(ids, skip_special_tokens=False)
            result.append(Prompt(ids, text))
        return result

    def _encode_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None,
        template_kwargs: dict[str, Any] | None,
    ) -> Prompt:
        ids = self._tokenizer.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt is not False,
            template_kwargs=template_kwargs,
        )
        self._refuse_unheard(messages)
        self._check(ids, "messages")
        if not ids:
            raise invalid("the chat template made an empty prompt of these messages", "messages")
        return Prompt(ids)

    def _refuse_unheard(self, messages: list[dict[str, Any]]) -> None:
        """What the template took without a word although it can make nothing of it."""
        template = self._tokenizer.chat_template
        sources = "" if template is None else "".join(template.sources.values())
        for index, message in enumerate(messages):
            if message["role"] not in ROLES:
                raise ChatTemplateError(f"messages[{index}].role: {message['role']!r} is not a known role")
            for name in ("tool_calls", "function_call"):
                if message.get(name) and name not in sources:
                    raise ChatTemplateError(
                        f"messages[{index}].{name}: the model's chat template leaves it out"
                    )
            if message.get("audio") is not None:
                raise ChatTemplateError(f"messages[{index}].audio is not served here")

    def _check(self, token_ids: Sequence[int], param: str) -> None:
        size = self._vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise invalid(f"{param}: token {token_id} is outside the vocabulary (0 to {size - 1})", param)
