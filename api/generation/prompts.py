"""Prompts: texts and conversations to token ids, checked against the vocabulary; long ones in worker threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

from ...core.text.chat_template import ChatTemplateError
from ...core.text.tokenizer import Tokenizer
from ..errors import ApiError, invalid
from ..http.json_pieces import written
from ..protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from ..tools.toolset import check_tools, definitions
from ..workers import Workers

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""OpenAI's. A template that has its own opinion about roles is heard first."""


SHORT = 1000
"""Characters that are made tokens of on the event loop: half a millisecond's work, two where they are exotic."""
PROMPT_CHARACTERS = 32
"""What one more prompt costs, in characters."""

P = ParamSpec("P")
T = TypeVar("T")


class Prompt(msgspec.Struct, frozen=True):
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
        size = sum(len(prompt) + PROMPT_CHARACTERS for prompt in prompts)
        return await self._here_or_there(size, self._encode_all, prompts, add_special_tokens, with_text)

    async def of_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool | None,
        template_kwargs: dict[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        bounded: bool = True,
    ) -> Prompt:
        """Raises `ChatTemplateError` with the template's own words where it refuses the messages. `bounded`: what is
        certainly beyond the model's context is refused before it is tokenised."""
        size = SHORT + 1 if template_kwargs or tools else _size(messages)
        return await self._here_or_there(
            size, self._encode_chat, messages, add_generation_prompt, template_kwargs, tools, bounded
        )

    async def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if body.messages is not None:
            tools = body.tools or []
            check_tools(tools)
            prompt = await self.of_chat(
                body.messages,
                body.add_generation_prompt,
                body.chat_template_kwargs,
                definitions(tools),
                bounded=False,
            )
            ids = prompt.token_ids
        else:
            ids = await self._text(
                self._tokenizer.encode, body.prompt or "", body.add_special_tokens is not False
            )
        return await self._text(self._tokens, ids, bool(body.return_token_strs))

    def _tokens(self, ids: list[int], with_names: bool) -> TokenizeResponse:
        names = written([self._tokenizer.token_name(id) for id in ids]) if with_names else None
        return TokenizeResponse(len(ids), self._max_model_len, written(ids), names)

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        return DetokenizeResponse(await self._text(self._decode, body.tokens))

    def _decode(self, token_ids: list[int]) -> str:
        self._check(token_ids, "tokens")
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def info(self) -> TokenizerInfo:
        """Of the base's tokenizer, which is every adapter's too."""
        template, special = self._tokenizer.chat_template, self._tokenizer.special_tokens
        return TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            unk_token=special.get("unk_token"),
            pad_token=special.get("pad_token"),
            chat_template=None if template is None else template.sources.get("default"),
            model_max_length=self._max_model_len,
        )

    async def _here_or_there(
        self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """In a thread, or here where it is about so few characters that the way there and back costs more."""
        if size <= SHORT:
            return function(*args, **kwargs)
        return await self._text(function, *args, **kwargs)

    def _encode_all(
        self, prompts: Sequence[str | list[int]], add_special_tokens: bool, with_text: bool
    ) -> list[Prompt]:
        result = []
        for prompt in prompts:
            if isinstance(prompt, str):
                self._refuse_long(prompt, "prompt")
                ids = self._tokenizer.encode(prompt, add_special_tokens)
            else:
                ids = prompt
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
        tools: Sequence[Mapping[str, Any]] | None,
        bounded: bool,
    ) -> Prompt:
        if tools:
            self._tokenizer.refuse_unheard_tools()
        text = self._tokenizer.render_chat(
            messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt is not False,
            template_kwargs=template_kwargs,
        )
        if bounded:
            self._refuse_long(text, "messages")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
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

    def _refuse_long(self, text: str, param: str) -> None:
        """A text of megabytes is not tokenised only to be told that it is too long."""
        least, limit = self._tokenizer.at_least(text), self._max_model_len
        if least > limit:
            message = f"the prompt has {least} tokens at the least, and the model's context is {limit}"
            raise ApiError("context_length_exceeded", message, param)

    def _check(self, token_ids: Sequence[int], param: str) -> None:
        size = self._vocab_size
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
            return
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise invalid(f"{param}: token {token_id} is outside the vocabulary (0 to {size - 1})", param)


def _size(messages: list[dict[str, Any]]) -> int:
    """Characters of a plain conversation; of any other, more than are short."""
    size = 0
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) or len(message) > 2:
            return SHORT + 1
        size += len(content) + PROMPT_CHARACTERS
    return size
