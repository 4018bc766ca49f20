"""`/v1/completions`: OpenAI's request and answer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import invalid
from .generation import FinishReason, GenerationBody, Usage
from .unserved import OF_CHAT, Harmless

MAX_PROMPTS = 1024


class CompletionRequest(GenerationBody, kw_only=True):
    UNSERVED: ClassVar[Harmless] = {
        **GenerationBody.UNSERVED,
        "add_generation_prompt": (True,),
        "chat_template_kwargs": ({},),
        "messages": (),
        "parallel_tool_calls": (True,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
    }
    INSTEAD: ClassVar[dict[str, str]] = {
        **dict.fromkeys(UNSERVED.keys() - GenerationBody.UNSERVED.keys(), OF_CHAT),
        "top_logprobs": "here logprobs is their number",
    }
    MAX_TOKENS: ClassVar[int | None] = 16
    PROMPT_FIELD: ClassVar[str] = "prompt"

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer may add its own tokens (bos) to a prompt of text; it may by default."""

    add_generation_prompt: Any = None
    chat_template_kwargs: Any = None
    messages: Any = None
    parallel_tool_calls: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None

    def num_prompts(self) -> int:
        return len(self.prompts())

    def token_logprobs(self) -> tuple[int | None, int | None]:
        return self.logprobs, self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt: a text, or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise invalid("prompt must be a text, token ids, or a list of either, and not empty", "prompt")
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]  # type: ignore[list-item]
        if len(kinds) > 1:
            raise invalid("prompt must be all texts, all token ids, or all lists of token ids", "prompt")
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
        return prompt  # type: ignore[return-value]


class CompletionLogprobs(msgspec.Struct):
    """Lists of one length, one entry a token; `text_offset` counts characters of the choice's `text`."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    """The stop text or stop token that ended it (vLLM's field)."""


class CompletionResponse(msgspec.Struct):
    """The whole answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    adapter: str | list[str] | None
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
