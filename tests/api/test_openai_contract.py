"""OpenAI's contract on a whole server with a real engine: streams, plain answers and the model's own numbers agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from .peft_reference import reference, text_of
from .server_process import PROMPT, Process, served


@pytest.fixture(scope="module")
def server(world, tmp_path_factory) -> Iterator[Process]:
    settings = {
        "engine": {"model": str(world["base"])},
        "served_model_name": "tiny",
        "adapter_roots": [world["adapters"]],
        "data_dir": tmp_path_factory.mktemp("contract"),
    }
    with served(**settings) as process:
        process.client.post("/adapters", json={"name": "five", "source": "five"}).raise_for_status()
        yield process


@pytest.fixture(scope="module")
def greedy(world) -> str:
    return text_of(reference(world, None, [*PROMPT.encode()], 12)[0])


def events(server: Process, **fields: Any) -> list[dict[str, Any]]:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    fields = fields if "messages" in fields else {"prompt": PROMPT, **fields}
    answer = server.client.post(path, json={"temperature": 0, "max_tokens": 12, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    *lines, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "), parse_constant=pytest.fail) for line in lines]


def plain(server: Process, **fields: Any) -> dict[str, Any]:
    answer = server.complete(**fields)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


def text_at(chunks: list[dict[str, Any]], index: int) -> tuple[str, list[str]]:
    """The text of one choice, and the finish reasons it was given."""
    pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(p["text"] for p in pieces), [p["finish_reason"] for p in pieces if p["finish_reason"]]


def test_bytes_that_are_no_characters_are_the_same_text_in_streams_and_plain_answers(server, world):
    """A model with random weights says random bytes: characters whole, broken, and cut off at the end."""
    broken = 0
    for seed in range(6):
        fields = {"seed": seed, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
        (choice,) = plain(server, **fields, logprobs=0)["choices"]
        data = b"".join(token_bytes(token) for token in choice["logprobs"]["tokens"])
        assert choice["text"] == data.decode(errors="replace")
        assert text_at(events(server, **fields), 0) == (choice["text"], ["length"])
        broken += "\ufffd" in choice["text"]
    assert broken


def token_bytes(token: str) -> bytes:
    """What a token's name in an answer stands for; special ones are no text."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return b"" if token.startswith("<") and len(token) > 1 else token.encode()


def test_a_character_of_several_tokens_is_one_piece_of_a_stream(server):
    fields = {"guided_choice": ["a😀世"], "max_tokens": 12}
    pieces = [chunk["choices"][0]["text"] for chunk in events(server, **fields)]
    assert [piece for piece in pieces if piece] == ["a", "😀", "世"]
    assert plain(server, **fields)["choices"][0]["text"] == "a😀世"
    cut = plain(server, **{**fields, "max_tokens": 3})["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("a\ufffd", "length")
    assert text_at(events(server, **{**fields, "max_tokens": 3}), 0) == ("a\ufffd", ["length"])


@pytest.mark.parametrize("temperature", [0, 1e-3, 1e-4, 1e-5, 1e-8, 5e-324])
def test_tiny_temperatures_are_greedy(server, greedy, temperature):
    (choice,) = plain(server, temperature=temperature, logprobs=1)["choices"]
    assert choice["text"] == greedy
    assert all(value > -50 for value in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("adapter", [None, "five"])
def test_scores_of_a_prompt_are_the_models_whether_tokens_follow_or_not(server, world, adapter):
    model: Any = LlamaForCausalLM.from_pretrained(world["base"]).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, world["adapters"] / adapter).eval()
    ids = [*PROMPT.encode()]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    expected = [float(rows[i, token]) for i, token in enumerate(ids[1:])]
    for prompt in (PROMPT, ids, [ids]):
        for count in (0, 1, 3):
            fields = {"prompt": prompt, "adapter": adapter, "echo": True, "logprobs": 1, "max_tokens": count}
            body = plain(server, **fields)
            (choice,) = body["choices"]
            scores = choice["logprobs"]["token_logprobs"]
            assert scores[0] is None
            assert scores[1 : len(ids)] == pytest.approx(expected, abs=1e-3)
            assert len(scores) == len(ids) + body["usage"]["completion_tokens"]
            assert choice["text"].startswith(PROMPT)
            pieces = [c["logprobs"]["token_logprobs"] for e in events(server, **fields) for c in e["choices"]]
            assert [value for piece in pieces for value in piece] == scores


def test_filters_and_biases_leave_finite_numbers_behind(server):
    banned = {str(token): -100 for token in range(250)}
    for fields in (
        {"top_k": 1, "echo": True},
        {"logit_bias": banned},
        {"guided_choice": ["x"], "top_p": 0.01},
    ):
        (choice,) = plain(server, **fields, logprobs=5, temperature=1.0, seed=3)["choices"]
        values = [v for v in choice["logprobs"]["token_logprobs"] if v is not None]
        assert all(-9999.0 <= value <= 0.0 for value in values)
        for chunk in events(server, **fields, logprobs=5, temperature=1.0, seed=3):
            assert chunk["choices"]


def test_streams_of_several_prompts_and_answers_are_the_plain_ones(server):
    for prompts in (["A", "BC"], [[65], [66, 67]]):
        fields = {"prompt": prompts, "n": 2, "echo": True, "temperature": 1.0, "seed": 11}
        fields |= {"stream_options": {"include_usage": True}}
        chunks = events(server, **fields)
        fields.pop("stream_options")
        whole = plain(server, **fields)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        for choice in whole["choices"]:
            assert choice["text"].startswith("A" if choice["index"] < 2 else "BC")
            assert text_at(chunks, choice["index"]) == (choice["text"], [choice["finish_reason"]])
        assert chunks[-1]["choices"] == []
        usage, streamed = whole["usage"], chunks[-1]["usage"]
        assert {**usage, "prompt_tokens_details": None} == {**streamed, "prompt_tokens_details": None}


def test_every_seed_is_a_seed(server):
    texts = {}
    for seed in (-(2**63), -1, 0, 1, 2**63 - 1):
        twice = [plain(server, seed=seed, temperature=1.0, ignore_eos=True)["choices"] for _ in range(2)]
        assert twice[0] == twice[1]
        texts[seed] = twice[0][0]["text"]
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [[1, 264]]},
        {"prompt": [[-1]]},
        {"prompt": [[5279552648203111001]]},
        {"stop_token_ids": [151645], "min_tokens": 1},
        {"logit_bias": {"264": 1}},
        {"prompt": ""},
        {"prompt": [[]]},
        {"seed": 2**64},
        {"n": 1_000_000},
        {"logprobs": 1_000_000},
        {"temperature": -0.1},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_what_would_fault_in_an_engine_never_gets_there(server, greedy, fields):
    answer = server.complete(**fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert server.complete().json()["choices"][0]["text"] == greedy


@pytest.mark.parametrize("model", ["typo-adapter", " ", "five@2", "five@", "FIVE", "five "])
def test_an_unknown_name_is_never_answered_by_the_base(server, model):
    bodies = set()
    for field in ("model", "adapter"):
        answer = server.complete(**{field: model})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        bodies.add(answer.text.replace(f'"param":"{field}"', '"param":""'))
    assert len(bodies) == 1


def test_an_unloaded_adapter_is_as_unknown_as_one_that_never_was(server):
    server.client.post("/adapters", json={"name": "gone", "source": "one"}).raise_for_status()
    assert server.complete(model="gone").status_code == 200
    server.client.delete("/adapters/gone").raise_for_status()
    gone, never = server.complete(model="gone"), server.complete(model="ever")
    assert gone.status_code == never.status_code == 404
    assert gone.text.replace("gone", "ever") == never.text


@pytest.mark.parametrize("name", ["tiny", "five", "five@1"])
def test_every_body_and_chunk_repeats_the_requested_model(server, name):
    turns = [{"role": "user", "content": "hi"}]
    before = server.client.get("/adapters/five").json()["requests"]
    chat = server.client.post(
        "/v1/chat/completions", json={"model": name, "messages": turns, "max_tokens": 2}
    )
    bodies = [plain(server, model=name), chat.json(), *events(server, model=name)]
    bodies += events(server, model=name, messages=turns)
    label = None if name == "tiny" else "five@1"
    assert {(body["model"], body["adapter"]) for body in bodies} == {(name, label)}
    after = server.client.get("/adapters/five").json()["requests"]
    assert after - before == (0 if name == "tiny" else 4)
