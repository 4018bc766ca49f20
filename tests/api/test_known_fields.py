"""Every field that OpenAI's or vLLM's server knows, at either endpoint: served or refused by name, never ignored."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from heddle.api.protocol.chat import ChatRequest
from heddle.api.protocol.completions import CompletionRequest
from heddle.api.protocol.generation import GenerationBody
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from .test_request_fields import CHAT, COMPLETIONS, refusal

OPENAI = {
    *typing.get_type_hints(completion_create_params.CompletionCreateParamsStreaming),
    *typing.get_type_hints(chat_create_params.CompletionCreateParamsStreaming),
}
"""As its client has them, for completions and chat together."""

VLLM = frozenset({
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template",
    "chat_template_kwargs", "continue_final_message", "documents", "echo", "ec_transfer_params",
    "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output", "kv_transfer_params",
    "length_penalty", "logit_bias", "logprob_token_ids", "logprobs", "max_completion_tokens", "max_tokens",
    "media_io_kwargs", "messages", "min_p", "min_tokens", "mm_processor_kwargs", "model", "n",
    "parallel_tool_calls", "presence_penalty", "priority", "prompt", "prompt_embeds", "prompt_logprobs",
    "reasoning_effort", "repetition_detection", "repetition_penalty", "request_id", "response_format",
    "return_mm_kwargs", "return_prompt_text", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "routed_experts_prompt_start", "seed", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_interval", "stream_options",
    "structured_outputs", "suffix", "temperature", "thinking_token_budget", "tool_choice", "tools", "top_k",
    "top_logprobs", "top_p", "truncate_prompt_tokens", "truncation_side", "use_beam_search", "user", "vllm_xargs",
    "watermarking",
})  # fmt: skip
"""Of its completions and chat together."""
VLLM_BEFORE = frozenset({
    "best_of", "guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "logits_processors", "structural_tag",
})  # fmt: skip
"""What it no longer has, and clients still send."""
OWN = frozenset({"adapter", "on_cold"})
KNOWN = sorted(OPENAI | VLLM | VLLM_BEFORE | OWN)

LABELS = {"user", "metadata", "prompt_cache_key", "request_id", "safety_identifier", "session_id"}
"""The caller's own: no answer depends on them."""

BODIES: list[tuple[str, type[GenerationBody], dict[str, Any]]] = [
    (COMPLETIONS, CompletionRequest, {"prompt": "hi"}),
    (CHAT, ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
]
BOTH = pytest.mark.parametrize(("path", "kind", "body"), BODIES, ids=["completions", "chat"])


def test_the_lists_are_what_they_say():
    assert {"logit_bias", "best_of", "web_search_options", "stream"} <= OPENAI
    assert len(KNOWN) > 80


@BOTH
def test_no_known_field_is_ignored(server, path, kind, body):
    """No field takes this, and who ignores a field takes anything."""
    for field in KNOWN:
        error = refusal(server.client.post(path, json={**body, field: [[{}]]}))
        assert error["param"] == field, error
    assert not server.engine.commands


@BOTH
def test_null_is_as_if_a_field_were_not_there(server, path, kind, body):
    """But for a null `adapter`, which is the base."""
    nulls = {field: None for field in KNOWN if field not in body}
    answer = server.client.post(path, json={**body, **nulls})
    assert answer.status_code == 200, answer.text


ASKED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "service_tier": "priority",
    "store": True,
    "suffix": "x",
    "verbosity": "low",
    "web_search_options": {},
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "cache_salt": "salt",
    "chat_template": "{{ 1 }}",
    "continue_final_message": True,
    "documents": [{"title": "a", "text": "b"}],
    "ec_transfer_params": {"a": 1},
    "guided_decoding_backend": "outlines",
    "guided_grammar": 'root ::= "a"',
    "guided_whitespace_pattern": " ",
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {"a": 1},
    "length_penalty": 0.5,
    "logits_processors": ["a.b"],
    "logprob_token_ids": [1],
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"a": 1},
    "priority": 1,
    "prompt_embeds": "AAAA",
    "prompt_logprobs": 1,
    "repetition_detection": {"max_pattern_size": 2},
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": "no",
    "stream_interval": 5,
    "structural_tag": "{}",
    "thinking_token_budget": 5,
    "truncate_prompt_tokens": 5,
    "truncation_side": "middle",
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
"""What a client that wants something of a field sends there."""
ASKED_OF: dict[type[GenerationBody], dict[str, Any]] = {
    CompletionRequest: {
        "add_generation_prompt": False,
        "chat_template_kwargs": {"a": 1},
        "messages": [{"role": "user", "content": "hi"}],
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "top_logprobs": 2,
    },
    ChatRequest: {"add_special_tokens": True, "echo": True, "prompt": "hi"},
}


@BOTH
def test_what_is_not_served_is_refused_and_what_asks_for_nothing_is_not(server, path, kind, body):
    asked = ASKED | ASKED_OF[kind]
    assert asked.keys() == kind.UNSERVED.keys()
    for field, value in asked.items():
        error = refusal(server.client.post(path, json={**body, field: value}))
        assert error["param"] == field
        assert error["message"].startswith(f"{field} is not served here")
    assert not server.engine.commands
    for field, values in kind.UNSERVED.items():
        for value in values:
            answer = server.client.post(path, json={**body, field: value})
            assert answer.status_code == 200, answer.text


def test_a_field_of_the_other_endpoint_is_told_where_it_is_served(server):
    for field, value in ASKED_OF[CompletionRequest].items():
        message = refusal(server.complete(**{field: value}))["message"]
        hint = (
            "here logprobs is their number"
            if field == "top_logprobs"
            else "it is a field of /v1/chat/completions"
        )
        assert message == f"{field} is not served here: {hint}"
    assert refusal(server.chat(prompt="hi"))["message"].endswith("it is a field of /v1/completions")


@BOTH
def test_labels_of_the_caller_are_taken_and_change_nothing(server, path, kind, body):
    labels = dict.fromkeys(LABELS, "a label") | {"metadata": {"a": "b"}, "service_tier": "auto"}
    settings = {"seed": 5, "max_tokens": 4}
    answers = [server.client.post(path, json={**body, **settings, **more}).json() for more in ({}, labels)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]
    for field in LABELS:
        assert refusal(server.client.post(path, json={**body, field: 5}))["param"] == field


@BOTH
def test_what_both_endpoints_serve_is_read_by_both(path, kind, body):
    """A field that one of them serves and the other refuses belongs to the other's ways."""
    served = {field for field in KNOWN if field not in kind.UNSERVED}
    assert served <= set(kind.__struct_fields__)
    other = ChatRequest if kind is CompletionRequest else CompletionRequest
    assert served - set(other.__struct_fields__) == set()


@pytest.mark.parametrize("option", ["include_obfuscation", "continuous_usage_stats"])
def test_an_option_of_streams_that_would_do_nothing_is_refused(server, option):
    """Chunks of random length are not served, and usage so far goes only with usage."""
    assert server.complete(stream=True, stream_options={option: False}).status_code == 200
    for answer in (server.complete, server.chat):
        error = refusal(answer(stream=True, stream_options={option: True}))
        assert error["param"] == "stream_options"
        assert option in error["message"]


def test_no_alternatives_need_no_log_probabilities(server):
    """vLLM's clients send its default, 0."""
    assert server.chat(top_logprobs=0).status_code == 200
    assert server.chat(top_logprobs=0, logprobs=False).json()["choices"][0]["logprobs"] is None
    assert refusal(server.chat(top_logprobs=-1))["param"] == "top_logprobs"
