"""A whole server whose engine fails at a step, or dies: who is touched gets a 500, everything else goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .server_process import Process

FAULT = '''
"""Found by every Python process of the server: makes a step with a marked prompt raise in the engine's."""

import importlib.abc
import importlib.util
import sys


class PlantFault(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "heddle.core.engine.runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            execute = module.Runner.execute

            def fails(runner, plan, poison=None):
                for chunk in plan.chunks:
                    sequence = chunk.sequence
                    at = {ord("@"): 0, ord("#"): 3}.get(sequence.prompt_token_ids[0])
                    if at is not None and len(sequence.output_token_ids) >= at:
                        raise RuntimeError("planted")
                return execute(runner, plan, poison)

            module.Runner.execute = fails

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, PlantFault())
'''
AT_ONCE, LATER = "@ fails in its first step", "# fails after three tokens"
PROMPT = "The quick brown fox"
KEY = "the-admins-own-key"


@pytest.fixture(scope="module")
def server(world: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One sequence at a time, so that a step touches one alone; standard error goes to `errors`."""
    home = tmp_path_factory.mktemp("faults")
    (home / "sitecustomize.py").write_text(FAULT)
    errors = (home / "errors").open("w+")
    saved = os.dup(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(home))
        os.dup2(errors.fileno(), 2)  # the server's processes inherit it
        try:
            process = Process(
                engine={"model": str(world["base"]), "max_num_seqs": 1},
                served_model_name="tiny",
                adapter_roots=[world["adapters"]],
                data_dir=home / "data",
                admin_key=KEY,
            )
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    process.client.headers["authorization"] = f"Bearer {KEY}"
    process.errors = home / "errors"  # type: ignore[attr-defined]
    try:
        process.until_ready()
        yield process
    finally:
        errors.close()
        if process.popen.poll() is None:
            process.end()


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def refused(server: Process) -> float:
    """Calls that ended with internal_error."""
    lines = server.client.get("/metrics").text.splitlines()
    name = 'heddle_refused_requests_total{code="internal_error"} '
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0)


def adapters(server: Process) -> dict[str, float]:
    """By where they are."""
    places = ("device", "host", "disk")
    return {place: server.metric(f'adapters{{residency="{place}"}}') for place in places}


def test_a_failing_step_fails_its_own_requests_and_the_server_goes_on(server: Process):
    before = text(server.complete())
    pid, count = server.engine_pid(), refused(server)
    with ThreadPoolExecutor(6) as pool:
        fields: list[dict[str, Any]] = [
            {},
            {"prompt": AT_ONCE},
            {},
            {"prompt": LATER},
            {},
            {"prompt": AT_ONCE},
        ]
        answers = list(pool.map(lambda one: server.complete(**one), fields))
    for one, answer in zip(fields, answers):
        if not one:
            assert text(answer) == before
            continue
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("internal_error", "server_error")
        assert "planted" not in answer.text
    assert server.client.get("/ready").status_code == 200
    assert (server.engine_pid(), server.metric("engine_restarts_total")) == (pid, 0)
    assert refused(server) == count + 3
    server.wait_until(lambda: server.metric("running") == server.metric("waiting") == 0)
    server.complete()
    server.wait_until(lambda: server.metric("blocks_used") == 0)


def test_a_stream_that_has_begun_ends_with_an_error_event(server: Process):
    body = {"prompt": LATER, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    *chunks, last = answer.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "[DONE]" not in answer.text
    assert all(json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks)
    assert text(server.complete())


def test_the_reason_is_in_the_engines_log_which_is_json_too(server: Process):
    assert server.complete(prompt=AT_ONCE).status_code == 500
    lines = [json.loads(line) for line in server.errors.read_text().splitlines()]  # type: ignore[attr-defined]
    failed = [line for line in lines if line.get("process") == "engine" and "a step failed" in line["event"]]
    assert failed
    assert "planted" in failed[-1]["exception"]
    assert failed[-1]["level"] == "error"


def test_a_killed_engine_comes_back_with_tenants_keys_adapters_and_pins(server: Process):
    limits = {"queued_requests": 1, "pool_share": 0.5}
    assert server.client.post("/tenants", json={"name": "acme", "limits": limits}).status_code == 201
    key = server.client.post("/tenants/acme/keys").json()["key"]
    mine = {"authorization": f"Bearer {key}"}
    body = {"name": "own", "source": "one", "pinned": True}
    assert server.client.post("/adapters", json=body, headers=mine).status_code == 201

    def complete(**fields: Any) -> httpx.Response:
        request = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
        return httpx.post(f"{server.url}/v1/completions", json=request, headers=mine, timeout=60)

    before, base = text(complete(adapter="own")), text(server.complete())
    assert before != base
    usage = server.client.get("/tenants/acme/usage").json()
    pid, blocks, known = server.engine_pid(), server.metric("blocks_total"), adapters(server)
    with ThreadPoolExecutor(4) as pool:  # one runs, the others wait behind it
        long = {"max_tokens": 230, "ignore_eos": True}
        several = [pool.submit(server.complete, **long) for _ in range(4)]
        server.wait_until(lambda: server.metric("waiting") == 3)
        os.kill(pid, signal.SIGKILL)
        answers = [one.result() for one in several]
    codes = sorted((answer.status_code, answer.json()["error"]["code"]) for answer in answers)
    assert codes == [(500, "internal_error"), *[(503, "overloaded")] * 3], "who had not begun may come again"
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    scrapes = 0
    while server.metric("engine_up") == 0:
        held = [server.metric(f"blocks_{use}") for use in ("used", "cached", "adapters", "free")]
        places, total = adapters(server), server.metric("blocks_total")
        if server.metric("engine_up") == 0:  # still, so it was down at all of these
            assert (held, sum(held)) == ([0, 0, 0, blocks], total)
            assert places == {"device": 0, "host": 0, "disk": sum(known.values())}
            scrapes += 1
    assert scrapes, "the metrics answered while no engine ran"
    server.wait_until(lambda: server.metric("engine_restarts_total") == 1 and server.is_up("/ready"))
    assert server.engine_pid() != pid
    assert text(complete(adapter="own")) == before
    assert text(server.complete()) == base
    server.wait_until(lambda: server.client.get("/adapters/own", headers=mine).json()["pinned"])
    assert server.metric("blocks_pinned") > 0
    assert server.client.get("/tenants/acme/usage").json()["requests"] == usage["requests"] + 1
    # The new engine knows what the tenant may queue: one runs, one waits, a third is one too many.
    with ThreadPoolExecutor(2) as pool:
        long = {"max_tokens": 230, "ignore_eos": True}
        running = pool.submit(complete, **long)
        server.wait_until(lambda: server.metric("running") == 1)
        queued = pool.submit(complete, **long)
        server.wait_until(lambda: server.metric("waiting") == 1)
        third = complete()
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "queued_requests" in third.json()["error"]["message"]
        assert running.result().status_code == queued.result().status_code == 200
