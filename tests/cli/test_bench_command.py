"""`heddle bench`: what it asks, prints and writes, and how it ends."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from typing import Any

import pytest

MODELS = (200, b'{"data": [{"id": "base"}, {"id": "pirate"}]}')


def stream(tokens: int = 3, prompt_tokens: int = 17) -> tuple[int, bytes]:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    events: list[Any] = [{"choices": [{"index": 0, "text": "a"}]} for _ in range(tokens)]
    events.append({"choices": [], "usage": usage})
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return 200, data + b"data: [DONE]\n\n"


def refusal(status: int = 429, code: str = "rate_limit_exceeded") -> tuple[int, bytes]:
    return status, json.dumps({"error": {"message": "slow down", "code": code}}).encode()


@pytest.fixture
def bench(heddle, server):
    def run(*args: str, answers: list[tuple[int, bytes]] | None = None):
        server.answers[:] = answers or [MODELS, stream()]
        return heddle("bench", server.url, *args)

    return run


def sent(server) -> list[dict]:
    return [asked.json for asked in server.asked if asked.method == "POST"]


def test_a_run_prints_its_table_and_ends_with_status_0(bench, server):
    result = bench("--requests", "12", "--concurrency", "3")
    assert result.exit_code == 0, result.output
    for words in (
        "requests",
        "succeeded",
        "output tokens/s",
        "time to first token",
        "between tokens",
        "end to end",
    ):
        assert words in result.output
    bodies = sent(server)
    assert len(bodies) == 14, "two of them warm up"
    assert {body["model"] for body in bodies} == {"base"}
    assert all(body["stream"] and body["max_tokens"] == 64 for body in bodies)


def test_adapters_go_where_the_server_wants_them(bench, server):
    bench(
        "--requests",
        "6",
        "--adapters",
        "a,b",
        "--adapters",
        "c",
        "--popularity",
        "distinct",
        "--warm-up",
        "0",
    )
    assert [body["model"] for body in sent(server)] == ["a", "b", "c", "a", "b", "c"]
    server.asked.clear()
    bench(
        *("--requests", "3", "--adapters", "a,b", "--popularity", "identical", "--adapter-field", "adapter"),
        *("--model", "m", "--warm-up", "0"),
        answers=[stream()],
    )
    assert [(body["model"], body["adapter"]) for body in sent(server)] == [("m", "a")] * 3


def test_the_json_file_holds_settings_figures_and_every_request(bench, server, tmp_path: Path):
    path = tmp_path / "out.json"
    result = bench(
        "--requests", "5", "--rate", "200", "--json", str(path), "--key", "secret", "--slo", "e2e:60000"
    )
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert "secret" not in path.read_text()
    assert server.asked[-1].headers["Authorization"] == "Bearer secret"
    assert (data["requests"], data["succeeded"], data["failed"], data["completion_tokens"]) == (5, 5, 0, 15)
    assert (data["settings"]["rate"], data["settings"]["seed"]) == (200.0, 0)
    assert data["goodput_share"] == 1.0
    assert [sample["index"] for sample in data["samples"]] == [0, 1, 2, 3, 4]
    assert all(len(sample["gaps"]) == 2 for sample in data["samples"])
    assert data["latency_ms"]["inter_token"]["count"] == 10


def test_refused_requests_end_with_status_1_and_are_told_by_code(bench):
    result = bench("--requests", "4", "--warm-up", "0", answers=[MODELS, stream(), refusal()])
    assert result.exit_code == 1
    assert "3 x rate_limit_exceeded: slow down" in result.output
    nothing = bench("--requests", "4", "--warm-up", "0", answers=[MODELS, (503, b"gone")])
    assert nothing.exit_code == 1
    assert "4 x http_503" in nothing.output
    assert "time to first token" not in nothing.output, "there is none to tell of"


def test_a_warm_up_that_fails_ends_the_run_before_it_begins(bench, server):
    result = bench(answers=[MODELS, refusal(404, "model_not_found")])
    assert result.exit_code == 1
    assert "the warm-up failed: slow down (model_not_found)" in result.output
    assert len(sent(server)) == 1


def test_a_server_that_is_not_there_ends_with_status_1(heddle):
    result = heddle("bench", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "http://127.0.0.1:1" in result.output
    assert "connection_failed" in result.output


@pytest.mark.parametrize(
    ("key", "what"), [(None, "the server wants a key"), ("old", "the server refused this key")]
)
@pytest.mark.parametrize("body", [refusal(401, "invalid_api_key")[1], b'{"error": "Unauthorized"}'])
def test_a_key_that_is_missing_or_refused_is_said_to_be(key, what, body, bench):
    result = bench(*(("--key", key) if key else ()), answers=[(401, body)])
    assert result.exit_code == 1
    assert what in result.output
    assert "OpenAI-style" not in result.output
    again = bench("--model", "m", *(("--key", key) if key else ()), answers=[(401, b"Unauthorized")])
    assert "the API key is missing, or refused" in again.output


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({"HEDDLE_ADMIN_KEY": "admin"}, "admin"),
        ({"HEDDLE_API_KEY": "own"}, "own"),
        ({"HEDDLE_API_KEY": "own", "HEDDLE_ADMIN_KEY": "admin"}, "own"),
    ],
)
def test_the_key_of_all_other_commands_does_for_this_one_too(variables, key, heddle, server):
    server.answers[:] = [MODELS, stream()]
    assert heddle("bench", server.url, "--requests", "1", env=variables).exit_code == 0
    assert {asked.headers["Authorization"] for asked in server.asked} == {f"Bearer {key}"}
    told = " ".join(heddle("bench", "--help").output.split())
    assert told.index("HEDDLE_API_KEY") < told.index("HEDDLE_ADMIN_KEY")


def test_something_that_lists_no_models_is_said_to_be_none_of_openais(bench):
    result = bench(answers=[(200, b"<html>")])
    assert result.exit_code == 1
    assert "is it an OpenAI-style server? --model names one" in result.output


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--rate", "5", "--concurrency", "2"), "not both"),
        (("--rate", "0"), "not a rate"),
        (("--rate", "nan"), "not a rate"),
        (("--rate", "inf", "--duration", "3"), "needs --requests"),
        (("--slo", "fast:3"), "not a goal"),
        (("--slo", "ttft:nan"), "not a goal"),
        (("--slo", "ttft:10", "--no-stream"), "need a stream"),
        (("--popularity", "some"), "popularity"),
        (("--requests", "0"), "requests"),
        (("--dataset", "/nowhere/x"), "does not exist"),
    ],
)
def test_wrong_usage_ends_with_status_2(args, reason, bench, server):
    result = bench(*args)
    assert result.exit_code == 2
    assert reason in result.output.replace("\n", " ")
    assert not server.asked


def test_a_data_set_that_is_none_ends_with_status_1(bench, tmp_path: Path):
    path = tmp_path / "set.jsonl"
    path.write_text("{}\n")
    result = bench("--dataset", str(path))
    assert result.exit_code == 1
    assert "line 1" in result.output


def test_the_prompts_of_a_data_set_are_sent_with_their_own_lengths(bench, server, tmp_path: Path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}], "max_tokens": 7, "adapter": "z"}\n')
    result = bench(
        *("--dataset", str(path), "--endpoint", "chat", "--requests", "2", "--ignore-eos", "--warm-up", "0"),
        answers=[MODELS, stream()],
    )
    assert result.exit_code == 0, result.output
    bodies = sent(server)
    assert bodies[0]["messages"] == [{"role": "user", "content": "x"}]
    assert (bodies[0]["max_tokens"], bodies[0]["model"], bodies[0]["ignore_eos"]) == (7, "z", True)
    assert all(asked.path == "/v1/chat/completions" for asked in server.asked if asked.method == "POST")


def test_a_plot_is_a_png_of_what_came_and_what_failed(bench, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    bench(
        *("--requests", "8", "--warm-up", "0", "--plot", str(path)),
        answers=[MODELS, stream(), stream(), refusal()],
    )
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    nothing = tmp_path / "nothing.png"
    bench(*("--requests", "2", "--warm-up", "0", "--plot", str(nothing)), answers=[MODELS, refusal()])
    assert nothing.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_anything_is_sent(bench, server, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    result = bench("--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "pip install 'heddle-serve[bench]'" in result.output
    assert not server.asked


def test_a_file_that_cannot_be_written_is_told_after_the_figures(bench, tmp_path: Path):
    result = bench("--requests", "1", "--json", str(tmp_path / "none" / "x.json"))
    assert result.exit_code == 1
    assert "No such file" in result.output
    assert "succeeded" in result.output


def test_an_infinite_rate_sends_all_at_once(bench, server, tmp_path: Path):
    path = tmp_path / "out.json"
    assert bench("--rate", "inf", "--requests", "20", "--json", str(path)).exit_code == 0
    data = json.loads(path.read_text())
    assert {sample["intended"] for sample in data["samples"]} == {0.0}
    assert data["settings"]["rate"] == str(math.inf)
