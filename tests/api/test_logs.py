"""The log: one line a call with what operators search for, and never a prompt, an answer or a key."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import pytest
from heddle.core.messages import EngineError
from structlog.testing import capture_logs

SECRET = "the prompt nobody may read"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
def lines(server):
    """The lines of calls."""
    server.do(asyncio.sleep(0))  # those of the calls before are written by then
    with capture_logs() as logs:
        yield logs


def line(server, lines):
    """The only line there is, once the call is over."""
    server.wait_until(lambda: len(lines) == 1)
    assert SECRET not in repr(lines)
    (found,) = lines
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_leaves_one_line_with_all_that_is_known_of_it(server, lines, stream):
    server.engine.cached_tokens = 3
    body = {"prompt": SECRET, "n": 2, "adapter": "a", "stream": stream}
    server.client.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    found = line(server, lines)
    assert 0 < found.pop("ttft") <= found.pop("duration") < 20
    assert found == {
        "event": "call", "log_level": "info", "method": "POST", "path": "/v1/completions", "status": 200,
        "tenant": "public", "model": "tiny", "adapter": "a@1", "prompt_tokens": len(SECRET),
        "completion_tokens": 14, "cached_tokens": 3,
    }  # fmt: skip


def test_the_base_alone_and_several_adapters(server, lines):
    server.client.post("/v1/chat/completions", json=CHAT)
    assert "adapter" not in line(server, lines)
    lines.clear()
    server.client.post("/v1/chat/completions", json={**CHAT, "adapter": [{"name": "a"}, {"name": "b"}]})
    assert line(server, lines)["adapter"] == ["a@1", "b@1"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_there_by_their_codes_in_the_middle_of_a_stream_too(server, lines, stream):
    server.engine.fail_after = 2
    server.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    found = line(server, lines)
    assert (found["status"], found["code"]) == (200 if stream else 500, "internal_error")
    assert found["completion_tokens"] == 2


def test_refusals_have_their_code_and_no_tokens(server, lines):
    server.engine.refusal = EngineError("overloaded", "full")
    server.client.post("/v1/chat/completions", json=CHAT)
    found = line(server, lines)
    assert (found["status"], found["code"], found["completion_tokens"]) == (503, "overloaded", 0)
    lines.clear()
    server.client.post("/v1/completions", json={"prompt": SECRET, "adapter": SECRET})
    assert line(server, lines)["code"] == "model_not_found"


def test_a_client_that_leaves_is_said_to_have_left(server, lines):
    server.engine.hang_after = 1
    with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        next(answer.iter_lines())
    found = line(server, lines)
    assert found["aborted"] is True
    assert "code" not in found


def test_calls_for_the_machinery_are_quiet(server, lines):
    for path in ("/health", "/ready", "/metrics"):
        server.client.get(path)
    server.wait_until(lambda: len(lines) == 3)
    assert {one["log_level"] for one in lines} == {"debug"}
    lines.clear()
    server.client.get("/v1/models?key=secret")
    found = line(server, lines)
    assert (found["log_level"], found["path"]) == ("info", "/v1/models")


def test_a_path_cannot_break_the_line(server, lines):
    server.client.get("/adapters/a%0a2026%20[info]%20forged%1b[2J")
    found = line(server, lines)
    assert found["path"] == "/adapters/a%0a2026%20[info]%20forged%1b[2J"
    lines.clear()
    server.client.get("/adapters/" + "x" * 5000)
    assert len(line(server, lines)["path"]) == 512


def test_keys_are_in_no_line(base, serve, tmp_path):
    with serve(tmp_path, base, admin_key="adm1n") as server, capture_logs() as logs:
        for key in ("adm1n", "wr0ng"):
            server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        server.wait_until(lambda: len(logs) == 2)
        assert [one["status"] for one in logs] == [200, 401]
        assert "adm1n" not in repr(logs)
        assert "wr0ng" not in repr(logs)


SCRIPT = """
import logging, sys
from heddle.core import logs
import structlog

if sys.argv[2] == "terminal":
    sys.stderr.isatty = lambda: True
logs.configure(sys.argv[1], lambda: {"request_id": "req-1"}, process="engine")
logger = structlog.get_logger("x")
logger.debug("quiet")
logger.info("said", number=3)
logging.getLogger("heddle.core.engine").warning("of the %s library", "standard")
logging.getLogger("uvicorn").info("noise")

def fails():
    prompt = "a secret prompt"
    raise ValueError("planted")

try:
    fails()
except ValueError as error:
    logger.error("went wrong", exc_info=error)
    logging.getLogger("y").exception("and here")
"""


def written(level: str, where: str) -> str:
    command = [sys.executable, "-P", "-c", SCRIPT, level, where]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    return done.stderr


def test_every_line_on_standard_error_is_json():
    lines = [json.loads(text) for text in written("info", "file").splitlines()]
    assert [one["event"] for one in lines] == ["said", "of the standard library", "went wrong", "and here"]
    assert [one["level"] for one in lines] == ["info", "warning", "error", "error"]
    for one in lines:
        assert one["request_id"] == "req-1"
        assert one["process"] == "engine"
        assert one["timestamp"].endswith("Z")
    assert "planted" in lines[2]["exception"]
    assert "planted" in lines[3]["exception"]


@pytest.mark.parametrize(("level", "events"), [("debug", 5), ("warning", 3), ("critical", 0)])
def test_the_level_is_the_least_that_is_written(level, events):
    assert len(written(level, "file").splitlines()) == events


ODD = r"""
import math, sys
from heddle.core import logs
import structlog

logs.configure("info")
structlog.get_logger("x").info("odd", big=2**70, text="Grüße\u2028\x9b2J", half="\ud800", thing=sys, keys={(1, 2): 3})
"""


def test_whatever_is_logged_is_one_line_of_ascii():
    """What some reader takes for a line's end, or a terminal for a command, stands there escaped."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", ODD],
        capture_output=True,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.stderr.isascii()
    (text,) = done.stderr.decode().splitlines()
    found = json.loads(text)
    assert (found["event"], found["big"], found["text"]) == ("odd", 2**70, "Grüße\u2028\x9b2J")
    assert found["half"] == "\ud800"
    assert found["thing"].startswith("<module")


def test_on_a_terminal_it_is_for_people_and_shows_no_variables():
    """A formatter of exceptions that prints local values would print prompts and keys."""
    text = written("info", "terminal")
    assert "said" in text
    assert "planted" in text
    assert not text.startswith("{")
    assert "secret prompt" not in text


CALLS = r"""
import sys, time
from heddle.api import logs
from heddle.api.http import calls

if sys.argv[2] == "terminal":
    sys.stderr.isatty = lambda: True
logs.configure(sys.argv[1])
generated = calls.Generated("chat", "m", ["a@1", "b@2"], "chatcmpl-1", True, 2, None, 1.0, 1.0, 5, 7, 3, 0.25)
began = time.monotonic()
over = [
    ("info", calls.Call("req-1", "POST", "/v1/chat/completions", tenant="t", status=200, generated=generated)),
    ("debug", calls.Call("req-2", "GET", "/health", status=200)),
    ("info", calls.Call("req-3", "GET", "/\u00fc\u2028\ud800" + 600 * "x", status=404, code="c", left=True)),
]
for _, call in over:
    call.began, call.ended = began, began + 0.5
if sys.argv[3] == "one by one":
    logs._lines = None
logs.log_calls(over)
logs.log_calls([])
"""


def lines_of_calls(level: str, where: str, how: str) -> list[str]:
    command = [sys.executable, "-P", "-c", CALLS, level, where, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stderr.split("\n")[:-1]  # to `splitlines` a path may hold the end of a line


@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_calls_that_are_over_together_have_the_lines_that_structlog_makes_of_each(level):
    together, alone = (lines_of_calls(level, "file", how) for how in ("together", "one by one"))
    assert len(together) == {"debug": 3, "info": 2, "warning": 0}[level]
    moment = re.compile(r'"timestamp": ?"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"')
    assert all(moment.search(line) for line in together)
    assert [moment.sub("", line) for line in together] == [moment.sub("", line) for line in alone]


def test_lines_of_calls_are_for_people_too_on_a_terminal():
    lines = lines_of_calls("debug", "terminal", "together")
    assert len(lines) == 3
    assert not any(line.startswith("{") for line in lines)
    assert all(f"req-{number}" in line for number, line in enumerate(lines, start=1))
