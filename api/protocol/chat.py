"""`/v1/chat/completions`: OpenAI's request and answer."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import invalid
from .generation import FinishReason, GenerationBody, Usage
from .tools import Tool, ToolCall, ToolCallDelta, ToolChoice
from .unserved import OF_COMPLETIONS, Harmless


class ChatRequest(GenerationBody, kw_only=True):
    UNSERVED: ClassVar[Harmless] = {
        **GenerationBody.UNSERVED,
        "add_special_tokens": (False,),
        "echo": (False,),
        "prompt": (),
    }
    INSTEAD: ClassVar[dict[str, str]] = {
        "add_special_tokens": "the chat template writes them",
        "echo": OF_COMPLETIONS,
        "prompt": OF_COMPLETIONS,
    }
    PROMPT_FIELD: ClassVar[str] = "messages"

    messages: list[dict[str, Any]]
    """Turns as they came; the chat template takes and checks them."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: one call an answer at most. None is true."""

    add_special_tokens: Any = None
    prompt: Any = None

    def num_prompts(self) -> int:
        return 1

    def token_logprobs(self) -> tuple[int | None, int | None]:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None, None

    def _field_of(self, param: str) -> str:
        return "top_logprobs" if param == "logprobs" else super()._field_of(param)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """None where there is nothing but tool calls."""
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatResponse(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    adapter: str | list[str] | None
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct):
    """One piece of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    adapter: str | list[str] | None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
