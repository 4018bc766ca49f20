"""Fields of OpenAI and vLLM that are known here and not served: refused by name, unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import msgspec

from ..errors import invalid

Harmless = dict[str, tuple[Any, ...]]
"""Fields that are not served, each with the values that ask for nothing. Null always does."""

OF_CHAT = "it is a field of /v1/chat/completions"
OF_COMPLETIONS = "it is a field of /v1/completions"


class Refusing(msgspec.Struct, kw_only=True):
    """A body that refuses what it knows and does not serve."""

    UNSERVED: ClassVar[Harmless] = {}
    INSTEAD: ClassVar[dict[str, str]] = {}
    """Of unserved fields: where what they ask for is to be had."""

    def refuse_unserved(self) -> None:
        """Raises `invalid_request` that names the first unserved field that asks for something."""
        values = _unserved(type(self))(self)
        if values.count(None) == len(values):
            return
        for (name, harmless), value in zip(self.UNSERVED.items(), values):
            if value is not None and not any(_same(value, one) for one in harmless):
                hint = f": {self.INSTEAD[name]}" if name in self.INSTEAD else ""
                raise invalid(f"{name} is not served here{hint}", name)


class UnservedFields(Refusing, kw_only=True):
    """What neither completions nor chat serve. That a field belongs to the other one of the two is no reason to take
    it without a word."""

    UNSERVED: ClassVar[Harmless] = {
        # OpenAI's
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
        "prompt_cache_retention": ("in_memory",),
        "reasoning_effort": ("none",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
        "verbosity": (),
        "web_search_options": (),
        # vLLM's
        "allowed_token_ids": (),
        "bad_words": ([],),
        "cache_salt": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "ec_transfer_params": (),
        "guided_decoding_backend": ("auto", "guidance"),
        "guided_grammar": (),
        "guided_whitespace_pattern": (),
        "include_reasoning": (True,),
        "include_stop_str_in_output": (False,),
        "kv_transfer_params": (),
        "length_penalty": (1.0,),
        "logits_processors": ([],),
        "logprob_token_ids": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "priority": (0,),
        "prompt_embeds": (),
        "prompt_logprobs": (),
        "repetition_detection": (),
        "return_mm_kwargs": (True,),
        "return_prompt_text": (False,),
        "return_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_tokens_as_token_ids": (False,),
        "routed_experts_prompt_start": (0,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True, False),  # there are none in the text
        "stream_interval": (1,),
        "structural_tag": (),
        "thinking_token_budget": (-1,),
        "truncate_prompt_tokens": (),
        "truncation_side": ("left", "right"),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    suffix: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    allowed_token_ids: Any = None
    bad_words: Any = None
    cache_salt: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    ec_transfer_params: Any = None
    guided_decoding_backend: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    include_reasoning: Any = None
    include_stop_str_in_output: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    priority: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    repetition_detection: Any = None
    return_mm_kwargs: Any = None
    return_prompt_text: Any = None
    return_token_ids: Any = None
    return_token_offsets: Any = None
    return_tokens_as_token_ids: Any = None
    routed_experts_prompt_start: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    stream_interval: Any = None
    structural_tag: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None


@cache
def _unserved(body: type[Refusing]) -> Callable[[Refusing], tuple[Any, ...]]:
    """What gets the values of its unserved fields, of which there are several."""
    return attrgetter(*body.UNSERVED)


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON has it: 0 is not false."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
