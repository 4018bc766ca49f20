"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import invalid
from .generation import WeightedAdapter
from .tools import Tool
from .unserved import Harmless, Refusing

OF_MESSAGES: Harmless = {
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "tools": ([],),
}
"""Fields that go with messages alone, with the values that ask for nothing beside a prompt too."""


class TokenizeRequest(Refusing, kw_only=True, forbid_unknown_fields=True):
    """A `prompt`, or `messages` that go through the chat template first."""

    UNSERVED: ClassVar[Harmless] = {
        "chat_template": (),
        "continue_final_message": (False,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = None
    adapter: str | list[WeightedAdapter] | UnsetType | None = UNSET
    """Must exist, as `model` must. Its tokens are the base's, whose tokenizer and template always apply."""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt. Messages bring their special tokens in the template."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    chat_template: Any = None
    continue_final_message: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    def check(self) -> None:
        """Raises `invalid_request` that names a field which is not served, or not with what is to be tokenised."""
        self.refuse_unserved()
        if self.messages is not None and self.add_special_tokens:
            raise invalid(
                "add_special_tokens is of a prompt: messages bring theirs in the template",
                "add_special_tokens",
            )
        for name, harmless in OF_MESSAGES.items():
            if self.prompt is not None and getattr(self, name) not in (None, *harmless):
                raise invalid(f"{name} is only allowed together with messages", name)


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    adapter: str | list[WeightedAdapter] | UnsetType | None = UNSET
    """As in `TokenizeRequest`."""
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What a client needs to write prompts itself. Each of the texts is null where the base has none."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int
