"""vLLM's own request fields and calls: each does what it does there, or is refused by its name."""

from __future__ import annotations

import re

import heddle
import jinja2
import pytest

from .test_request_fields import refusal

NEUTRAL = {
    "request_id": "r-1",
    "session_id": "s",
    "spaces_between_special_tokens": True,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "length_penalty": 1,
    "watermarking": False,
    "priority": 0,
    "bad_words": [],
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "return_token_offsets": False,
    "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0,
    "stream_interval": 1,
    "thinking_token_budget": -1,
    "vllm_xargs": {},
    "truncation_side": "left",
    "structured_outputs": None,
    "kv_transfer_params": None,
}
"""What vLLM's clients send when they want nothing of it."""

REFUSED = {
    "use_beam_search": True,
    "length_penalty": 0.5,
    "watermarking": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "allowed_token_ids": [1],
    "prompt_logprobs": 1,
    "logprob_token_ids": [1],
    "bad_words": ["x"],
    "priority": 1,
    "return_tokens_as_token_ids": True,
    "return_token_ids": True,
    "cache_salt": "salt",
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 2},
    "thinking_token_budget": 5,
}


def test_fields_that_ask_for_nothing_are_taken(server):
    assert server.complete(**NEUTRAL, add_special_tokens=True).status_code == 200
    chat = {
        "add_special_tokens": False,
        "continue_final_message": False,
        "include_reasoning": True,
        "documents": [],
    }
    assert server.chat(**NEUTRAL, **chat).status_code == 200


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_not_served_are_refused_by_name(server, field):
    for answer in (server.complete(**{field: REFUSED[field]}), server.chat(**{field: REFUSED[field]})):
        error = refusal(answer)
        assert error["param"] == field
        assert error["message"] == f"{field} is not served here"
    assert not server.engine.commands


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_special_tokens", True),
        ("continue_final_message", True),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"title": "a", "text": "b"}]),
        ("mm_processor_kwargs", {"a": 1}),
        ("media_io_kwargs", {"image": {}}),
    ],
)
def test_fields_of_chat_that_are_not_served_are_refused_by_name(server, field, value):
    assert refusal(server.chat(**{field: value}))["param"] == field


@pytest.mark.parametrize("value", [0, 1, "false", []])
def test_what_is_no_boolean_is_not_taken_for_one(server, value):
    assert refusal(server.complete(use_beam_search=value))["param"] == "use_beam_search"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_chunk_counts_up_to_the_last_ones(server, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream_options": options, "max_tokens": 4}
    body |= (
        {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    *chunks, last = server.events(path, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4]
    assert last["choices"] == []
    assert last["usage"] == chunks[-1]["usage"]


def test_calls_that_vllm_answers(server):
    assert server.client.get("/version").json() == {"version": heddle.__version__}
    for method in ("GET", "POST"):
        assert server.client.request(method, "/ping").status_code == 200
    base, *_ = server.client.get("/v1/models").json()["data"]
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"} <= set(base)


def test_a_client_can_write_chats_itself_with_the_servers_tokenizer(server):
    """As lm-eval does, whose remote tokenizer asks for these."""
    info = server.client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", None)
    assert info["model_max_length"] == 256
    turns = [{"role": "user", "content": "hi"}]
    text = jinja2.Template(info["chat_template"]).render(
        messages=turns, bos_token="<s>", add_generation_prompt=True
    )
    written = server.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert written["tokens"] == server.client.post("/tokenize", json={"messages": turns}).json()["tokens"]


def test_loading_twice_and_unloading_twice(own_server):
    """vLLM refuses both; a name that holds the same weights already is as it should be."""
    body = {"lora_name": "a", "lora_path": "a"}
    first = own_server.client.post("/v1/load_lora_adapter", json=body)
    assert (first.status_code, first.headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert own_server.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    other = own_server.client.post("/v1/load_lora_adapter", json={**body, "lora_path": "b"})
    assert other.json()["error"]["code"] == "adapter_exists"
    inplace = own_server.client.post(
        "/v1/load_lora_adapter", json={**body, "lora_path": "b", "load_inplace": True}
    )
    assert inplace.status_code == 200
    for status in (200, 404):
        gone = own_server.client.post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 1})
        assert gone.status_code == status


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (LOAD, {"lora_name": "", "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "a b", "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "x" * 200, "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": 5, "lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_path": "a"}, 400, "lora_name"),
        (LOAD, {"lora_name": "tiny", "lora_path": "a"}, 409, "lora_name"),
        (LOAD, {"lora_name": "a", "lora_path": "b"}, 409, "lora_name"),
        (LOAD, {"lora_name": "n", "lora_path": "/etc"}, 400, "lora_path"),
        (LOAD, {"lora_name": "n", "lora_path": ""}, 400, "lora_path"),
        (LOAD, {"lora_name": "n", "lora_path": "../a"}, 400, "lora_path"),
        (LOAD, {"lora_name": "n", "lora_path": "hf:x"}, 400, "lora_path"),
        (LOAD, {"lora_name": "n", "lora_path": None}, 400, "lora_path"),
        (LOAD, {"lora_name": "n"}, 400, "lora_path"),
        (LOAD, {"lora_name": "n", "lora_path": "a", "load_inplace": "yes"}, 400, "load_inplace"),
        (LOAD, {"lora_name": "n", "lora_path": "a", "is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
        (LOAD, {"lora_name": "n", "lora_path": "a", "pinned": True}, 400, "pinned"),
        (LOAD, {"name": "n", "lora_name": "n", "lora_path": "a"}, 400, "name"),
        (UNLOAD, {"lora_name": "nope"}, 404, "lora_name"),
        (UNLOAD, {"lora_name": "a@7"}, 404, "lora_name"),
        (UNLOAD, {}, 400, "lora_name"),
        (UNLOAD, {"lora_name": "a", "lora_int_id": "x"}, 400, "lora_int_id"),
        (UNLOAD, {"lora_name": "a", "force": True}, 400, "force"),
    ],
    ids=str,
)
def test_refusals_of_vllms_calls_name_vllms_fields(server, path, body, status, param):
    answer = server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    if param.startswith("lora"):
        assert not re.match(r"name|source|replace", error["message"])
    assert [a["name"] for a in server.client.get("/adapters").json()["data"]] == ["a", "b"]


def test_a_name_that_is_taken_is_told_of_vllms_way_to_replace_it(server):
    answer = server.client.post(LOAD, json={"lora_name": "a", "lora_path": "b"})
    assert answer.json()["error"]["message"].endswith("set load_inplace to make a new version of it")
    answer = server.client.post(LOAD, json={"lora_name": "; set replace to", "lora_path": "b"})
    assert answer.json()["error"]["message"].startswith("lora_name must be ")
    gone = server.client.post(UNLOAD, json={"lora_name": "source must "}).json()["error"]["message"]
    assert gone == "there is no adapter 'source must '"
