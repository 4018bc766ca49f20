"""The bodies of completions and chat: text, ends, log-probabilities, echo, usage; whole and streamed."""

from __future__ import annotations

import json

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURN = {"messages": [{"role": "user", "content": "hi"}]}


def joined(events, index=0):
    """Text, finish reasons and completions' log-probabilities of one choice of a stream."""
    pieces = [c for e in events for c in e["choices"] if c["index"] == index]
    text = "".join(p["text"] if "text" in p else p["delta"].get("content", "") for p in pieces)
    ends = [p["finish_reason"] for p in pieces if p["finish_reason"] is not None]
    assert pieces[-1]["finish_reason"] is not None
    return text, ends, [p["logprobs"] for p in pieces if p["logprobs"]]


def test_a_completion_has_openais_shape(server):
    server.engine.cached_tokens = 1
    body = server.complete(model="tiny", user="u").json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["adapter"] is None
    assert body["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_chat_answer_has_openais_shape(server):
    body = server.chat().json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt = b"\x00" + b"hi"  # <s>, <|user|>, h, i, <|assistant|>
    assert body["usage"]["prompt_tokens"] == len(prompt) + 2


def test_a_chat_stream_begins_with_the_role_and_ends_once(server):
    events = server.events(CHAT, TURN)
    assert all(e["object"] == "chat.completion.chunk" for e in events)
    assert len({e["id"] for e in events}) == 1
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in e["choices"][0]["delta"] for e in events[1:])
    assert joined(events)[:2] == ("hello", ["stop"])
    assert all("usage" not in e for e in events)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("burst", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("script", "stop", "text", "tokens"),
    [
        (b"ab ABCDEFGHIJ", ["DEFGHIJ"], "ab ABC", 13),
        (b"in Paris", "Pari", "in ", 7),
        (b"abcdef", ["cde", "d"], "ab", 5),
        (b"near DEFGHIX miss", ["DEFGHIJ"], "near DEFGHIX miss", 18),
        (b"hello", ["h"], "", 1),
        (b"hello", ["hi"], "hello", 6),
        ("a😀b".encode(), ["b"], "a😀", 6),
        ("a世b".encode()[:3], [], "a\ufffd", 4),
    ],
)
def test_text_ends_just_before_a_stop_string_however_it_arrives(
    server, path, burst, script, stop, text, tokens
):
    server.engine.script, server.engine.burst = script, burst
    request = (
        {"prompt": "DEFGHIJ hi", "stop": stop, "max_tokens": 60}
        if path == COMPLETIONS
        else {
            **TURN,
            "stop": stop,
            "max_tokens": 60,
        }
    )
    whole = server.client.post(path, json=request).json()
    (choice,) = whole["choices"]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == text
    assert choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == tokens
    streamed, ends, _ = joined(server.events(path, request))
    assert (streamed, ends) == (text, ["stop"])


def test_only_a_stop_string_before_the_end_aborts_the_engines_sequence(server):
    server.complete()
    server.complete(max_tokens=2)
    assert not server.engine.aborted
    server.engine.delay = 0.005
    server.complete(stop="l")
    assert len(server.engine.aborted) == 1
    assert not server.engine.running, "freed before the answer was sent"


def test_the_stop_reason_is_the_users_own_stop(server):
    assert server.complete(stop="ll").json()["choices"][0]["stop_reason"] == "ll"
    server.engine.end_token = 258
    assert server.complete(ignore_eos=False).json()["choices"][0]["stop_reason"] is None
    server.engine.end_token = 99
    choice = server.complete(stop_token_ids=[99]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello", "stop", 99)
    choice = server.complete(max_tokens=3).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_several_prompts_and_answers_keep_their_indexes(server):
    request = {"prompt": ["A", "B"], "n": 2, "echo": True}
    whole = server.complete(**request).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert texts == ["Ahello", "Ahello", "Bhello", "Bhello"]
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["completion_tokens"] == 24
    events = server.events(COMPLETIONS, request)
    for index, text in enumerate(texts):
        assert joined(events, index)[:2] == (text, ["stop"])
    ids = server.complete(prompt=[[65, 66], [67]], echo=True).json()["choices"]
    assert [choice["text"] for choice in ids] == ["ABhello", "Chello"]
    (one,) = server.complete(prompt=[65, 66], echo=True).json()["choices"]
    assert one["text"] == "ABhello"


@pytest.mark.parametrize(("path", "request_"), [(COMPLETIONS, {"prompt": ["a", "bc"]}), (CHAT, TURN)])
def test_streamed_usage_comes_last_and_equals_the_plain_answers(server, path, request_):
    server.engine.cached_tokens = 1
    fields = {**request_, "n": 2, "stop": "lo"}
    whole = server.client.post(path, json=fields).json()["usage"]
    events = server.events(path, {**fields, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole
    assert all(e["usage"] is None for e in events[:-1])
    assert whole["prompt_tokens_details"]["cached_tokens"] == (2 if path == COMPLETIONS else 1)
    assert all("usage" not in e for e in server.events(path, fields))


def test_completion_logprobs_hold_the_chosen_token_too(server):
    body = server.complete(logprobs=2).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "e", "l", "l", "o", "</s>"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["token_logprobs"] == [-0.5] * 6
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
    assert logprobs["top_logprobs"][5]["</s>"] == -0.5
    zero = server.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert zero["top_logprobs"][0] == {"h": -0.5}


def test_chat_logprobs_have_bytes(server):
    server.engine.script = "é".encode()
    content = server.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [*b"</s>"]]
    assert content[0]["token"] == "bytes:\\xc3"
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    assert server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert server.chat(logprobs=False).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"stop": "wor"}, {"echo": True}, {"max_tokens": 3}])
def test_streamed_logprobs_are_the_plain_ones(server, burst, fields):
    server.engine.script, server.engine.burst = "hé world".encode(), burst
    request = {"prompt": "pq", "max_tokens": 40, "logprobs": 1, **fields}
    plain = server.complete(**request).json()["choices"][0]
    text, _, pieces = joined(server.events(COMPLETIONS, request))
    assert text == plain["text"]
    for name, values in plain["logprobs"].items():
        assert [value for piece in pieces for value in piece[name]] == values
    lengths = {len(values) for values in plain["logprobs"].values()}
    assert len(lengths) == 1


def test_a_token_without_text_keeps_its_logprobs_in_a_stream(server):
    """An end token that is to be ignored shows in no text, but it was chosen like any other."""
    server.engine.script = [104, server.engine.end_token, server.engine.end_token, 105]
    request = {"prompt": "pq", "max_tokens": 7, "logprobs": 1, "ignore_eos": True}
    plain = server.complete(**request).json()["choices"][0]
    assert len(plain["logprobs"]["tokens"]) == 7
    text, _, pieces = joined(server.events(COMPLETIONS, request))
    assert text == plain["text"] == "hih"
    assert [token for piece in pieces for token in piece["tokens"]] == plain["logprobs"]["tokens"]

    chat = {**TURN, "max_tokens": 7, "logprobs": True, "ignore_eos": True}
    whole = server.client.post(CHAT, json=chat).json()["choices"][0]["logprobs"]["content"]
    _, _, pieces = joined(server.events(CHAT, chat))
    assert [entry for piece in pieces for entry in piece["content"]] == whole
    assert len(whole) == 7


def test_chat_streams_the_same_logprobs(server):
    request = {**TURN, "logprobs": True, "top_logprobs": 1, "stop": "lo"}
    plain = server.client.post(CHAT, json=request).json()["choices"][0]["logprobs"]["content"]
    _, _, pieces = joined(server.events(CHAT, request))
    assert [entry for piece in pieces for entry in piece["content"]] == plain
    assert len(plain) == 5  # h e l l o: up to the token that completes the stop string


@pytest.mark.parametrize("stream", [False, True])
def test_minus_infinity_becomes_a_finite_floor(server, stream):
    server.engine.logprob = float("-inf")
    answer = server.complete(logprobs=2, echo=True, stream=stream)
    assert answer.status_code == 200
    assert "Infinity" not in answer.text
    assert "-9999.0" in answer.text


@pytest.mark.parametrize("prompt", ["a b c", [97, 32, 98, 32, 99]])
def test_echo_without_new_tokens_scores_the_prompt(server, prompt):
    body = server.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=1).json()
    (choice,) = body["choices"]
    assert choice["text"] == "a b c"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", " ", "b", " ", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 0
    assert server.engine.commands[-1].params.prompt_logprobs == 1


def test_echo_in_its_other_forms(server):
    assert server.complete(max_tokens=0, echo=True).json()["choices"][0]["text"] == "hi"
    assert server.complete(echo=True).json()["choices"][0]["text"] == "hihello"
    plain = server.complete(max_tokens=0).json()
    assert plain["choices"][0]["text"] == ""
    assert plain["choices"][0]["finish_reason"] == "length"
    events = server.events(COMPLETIONS, {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1})
    text, ends, pieces = joined(events)
    assert (text, ends) == ("hi", ["length"])
    assert pieces[0]["tokens"] == ["h", "i"]


def test_an_echoed_prompts_offsets_count_characters_and_skip_the_begin_token(model_folder, serve, tmp_path):
    with serve(tmp_path, model_folder(tmp_path / "bos", bos=True)) as server:
        body = server.complete(prompt="é<|user|>x", max_tokens=0, echo=True, logprobs=0).json()
        (choice,) = body["choices"]
        assert choice["text"] == "é<|user|>x"
        assert choice["logprobs"]["tokens"] == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "<|user|>", "x"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 9]


def test_best_of_gives_the_likeliest_and_bills_for_all(server):
    body = server.complete(best_of=3, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 18
    assert [command.params.logprobs for command in server.engine.commands] == [0, 0, 0]
    from heddle.api.generation.service import _best
    from heddle.core.sampling_params import SamplingParams

    class Ranked:
        def __init__(self, mean_logprob: float) -> None:
            self.mean_logprob = mean_logprob

    choices = [Ranked(value) for value in (-3, -1, -2, -5, -6, -4)]
    best = _best(choices, SamplingParams(n=2, best_of=3))  # type: ignore[arg-type]
    assert [choice.mean_logprob for choice in best] == [-1, -2, -4, -5]


def test_an_error_in_mid_stream_is_an_event_and_no_done_follows(server):
    server.engine.fail_after = 2
    answer = server.complete(stream=True)
    assert answer.status_code == 200
    lines = answer.text.strip().split("\n\n")
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "[DONE]" not in answer.text
    assert server.complete().status_code == 500
    assert server.complete(n=3).json()["error"]["type"] == "server_error"


# ---------------------------------------------------------------- chat messages


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_parts_are_joined_for_every_role(server, role):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert server.chat(messages=[{"role": role, "content": parts}]).status_code == 200
    prompt = server.engine.commands[-1].prompt_token_ids
    assert bytes(t for t in prompt if t < 256).decode().endswith("a\nb")


def test_empty_and_null_contents(server):
    assert server.chat(messages=[{"role": "user", "content": ""}]).status_code == 200
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    answer = server.chat(messages=[{"role": "user", "content": image}])
    assert answer.status_code == 400
    assert "image_url" in answer.json()["error"]["message"]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = server.chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert answer.status_code == 400, "a template that leaves tool calls out must not do so in silence"
    assert "tool_calls" in answer.json()["error"]["message"]


def test_a_templates_complaint_is_a_400_in_its_own_words(server):
    turn = {"role": "user", "content": "x"}
    answer = server.chat(messages=[turn, turn])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "Conversation roles must alternate user/assistant/user/assistant/..."
    )
    answer = server.chat(messages=[{"role": "wizard", "content": "x"}])
    assert answer.json()["error"]["message"] == "Only system, user and assistant speak here"
    assert answer.json()["error"]["param"] == "messages"


def test_without_a_template_chat_is_refused_and_completions_work(model_folder, serve, tmp_path):
    with serve(tmp_path, model_folder(tmp_path / "plain", template=None)) as server:
        answer = server.chat()
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
        assert server.complete().status_code == 200


def test_a_lax_template_gets_no_unknown_role_and_no_lost_tool_calls(model_folder, serve, tmp_path):
    lax = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    with serve(tmp_path, model_folder(tmp_path / "lax", template=lax)) as server:
        answer = server.chat(messages=[{"role": "wizard", "content": "x"}])
        assert answer.status_code == 400
        assert "wizard" in answer.json()["error"]["message"]
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert server.chat(messages=[message]).status_code == 200
        assert server.chat(messages=[{"role": "developer", "content": "x"}]).status_code == 200


def test_a_template_with_a_syntax_error_keeps_the_server_from_starting(model_folder, serve, tmp_path):
    base = model_folder(tmp_path / "broken", template="{% if %}")
    with pytest.raises(ValueError, match="syntax error"), serve(tmp_path, base):
        pass


# ---------------------------------------------------------------- tokenize


def test_tokenize_and_detokenize(server):
    post = server.client.post
    body = post("/tokenize", json={"model": "tiny", "prompt": "hi"}).json()
    assert body == {"count": 2, "max_model_len": 256, "tokens": [104, 105], "token_strs": None}
    body = post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    assert body["token_strs"] == ["h", "i"]
    body = post("/tokenize", json={"prompt": " é", "return_token_strs": True}).json()
    assert body["token_strs"] == ["Ġ", "Ã", "©"], "as the vocabulary spells them"
    body = post("/tokenize", json=TURN).json()
    assert body["tokens"] == [256, 258, *b"hi", 259]
    body = post("/tokenize", json={**TURN, "add_generation_prompt": False}).json()
    assert body["tokens"] == [256, 258, *b"hi"]
    assert post("/detokenize", json={"tokens": [258, 104]}).json() == {"prompt": "<|user|>h"}
    assert post("/detokenize", json={"tokens": [264]}).json()["error"]["param"] == "tokens"
    assert post("/tokenize", json={"prompt": "hi", "model": "nope"}).status_code == 404
    assert post("/tokenize", json={}).status_code == 400
    assert post("/tokenize", json={"prompt": "x", **TURN}).status_code == 400
