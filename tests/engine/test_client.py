"""The engine in its own process: answers, refusals, death and return, and nothing left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from heddle import LLM, SamplingParams
from heddle.core.client import EngineClient, EngineFailure, EngineStartError
from heddle.core.config import EngineConfig
from heddle.core.messages import AdapterUse, Generate, Progress, SequenceOutput, TenantShare

Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0.0, seed=0, ignore_eos=True)


@asynccontextmanager
async def running(base: Path, **settings: Any) -> AsyncIterator[EngineClient]:
    """A started client, closed at the end whatever happens."""
    defaults = {"model": str(base), "pool_memory": 2 << 20, "num_threads": 1, "backend": "reference"}
    client = EngineClient(EngineConfig(**(defaults | settings)))
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def collect(
    client: EngineClient,
    prompt: list[int],
    *digests: str,
    params: SamplingParams = GREEDY,
    tenant: str = "public",
) -> list[SequenceOutput]:
    command = Generate(
        key=client.new_key(),
        group=client.new_key(),
        prompt_token_ids=prompt,
        params=params,
        adapters=[AdapterUse(digest) for digest in digests],
        tenant=tenant,
    )
    return [output async for output in client.generate(command)]


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def refused_as_queued(client: EngineClient, tenant: str) -> None:
    with pytest.raises(EngineFailure, match="queued_requests = 0") as failure:
        await collect(client, [5], tenant=tenant)
    assert failure.value.error.code == "rate_limit_exceeded"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - what is waited for lies in another process
            await asyncio.sleep(0.01)


async def test_answers_adapters_refusals_and_aborts(
    base: Path, llm: LLM, prompts: list[list[int]], tmp_path: Path
) -> None:
    """One process serves all of this, to start it once."""
    descriptors = len(os.listdir("/proc/self/fd"))
    async with running(base) as client:
        assert client.ready is not None
        assert client.pid is not None
        assert psutil.Process(client.pid).is_running()

        # The same answers as in process, adapters on request.
        path = llm._engine._residency._adapters[llm.adapters["r5"]].path
        digest = llm.adapters["r5"]
        assert (await client.know(digest, path)).residency == "disk"
        names = [None, "r5"] * 8
        want = llm.generate(prompts, GREEDY, adapter=names)
        got = await asyncio.gather(
            *[collect(client, p, *([digest] if name else [])) for p, name in zip(prompts, names)]
        )
        assert [tokens(outputs) for outputs in got] == [output.outputs[0].token_ids for output in want]
        assert all([output.finish_reason for output in outputs][-1] == "length" for outputs in got)
        assert client.adapters[digest].residency == "device"
        assert client.stats.generated_tokens == 16 * 8

        # Adapter calls.
        assert (await client.evict(digest)).residency == "host"
        assert (await client.load(digest)).residency == "device"
        state = await client.pin(digest, True)
        assert (state.pinned, state.size) == (True, state.blocks)
        assert (await client.evict(digest, "disk")).residency == "disk"
        assert (await client.memory()).pool_bytes == 2 << 20
        with pytest.raises(EngineFailure) as failure:
            await client.load("sha256:unknown")
        assert failure.value.error.code == "adapter_not_found"
        await client.forget(digest)
        with pytest.raises(EngineFailure) as failure:
            await collect(client, [5], digest)
        assert failure.value.error.code == "model_not_found"

        # A file that is not there fails its own requests.
        await client.know("sha256:gone", str(tmp_path / "gone"))
        with pytest.raises(EngineFailure) as failure:
            await collect(client, [5], "sha256:gone")
        assert failure.value.error.code == "adapter_failed"
        for bad in ([5, 258], [10**30], []):
            with pytest.raises(EngineFailure) as failure:
                await collect(client, bad)
            assert failure.value.error.code == "invalid_request"

        # Leaving early ends the sequence in the engine.
        command = Generate(key=client.new_key(), group=0, prompt_token_ids=[5], params=LONG)
        stream = client.generate(command)
        assert (await anext(stream)).token_ids
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(collect(client, [6], params=LONG))
        await asyncio.sleep(0.02)
        task.cancel()
        aborted = Generate(key=client.new_key(), group=0, prompt_token_ids=[7], params=LONG)
        stream = client.generate(aborted)
        await anext(stream)
        client.abort([aborted.key, 10**9])
        assert [output.finish_reason async for output in stream][-1] == "abort"
        # The gauges say so, although there is no further step.
        await until(lambda: client.stats.blocks_used == 0 and client.stats.running == 0)
        assert len(tokens(await collect(client, [5]))) == 8
        await until(lambda: client.stats.blocks_used == 0 and client.stats.running == 0)
        generated = client.stats.generated_tokens
        assert generated < 16 * 8 + 3 * 200
        pid = client.pid
    assert not psutil.pid_exists(pid), "the process is gone and reaped"
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(EngineFailure) as failure:
        await collect(client, [5])
    assert failure.value.error.code == "shutting_down"


async def test_a_killed_engine_comes_back_with_its_adapters_and_tenants(
    base: Path, llm: LLM, prompts: list[list[int]]
) -> None:
    digest = llm.adapters["r4"]
    want = llm.generate(prompts[:1], GREEDY, adapter="r4")[0].outputs[0].token_ids
    async with running(base) as client:
        await client.know(digest, llm._engine._residency._adapters[digest].path)
        client.set_tenant(TenantShare(name="closed", queued_requests=0))
        client.set_tenant(TenantShare(name="gone", queued_requests=0))
        client.forget_tenant("gone")
        await refused_as_queued(client, "closed")
        assert tokens(await collect(client, prompts[0], digest, tenant="gone")) == want
        first = client.pid
        assert first is not None
        tasks = [asyncio.create_task(collect(client, prompt, digest, params=LONG)) for prompt in prompts[:6]]
        call = asyncio.create_task(client.load("sha256:unknown"))
        await until(lambda: client.stats.generated_tokens > 6 + 8)
        os.kill(first, signal.SIGKILL)
        for outcome in await asyncio.gather(*tasks):
            assert outcome[-1].finish_reason == "error"
            assert outcome[-1].error is not None
            assert outcome[-1].error.code == "internal_error"
            assert 0 < len(tokens(outcome)) < 200
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], EngineFailure)
        assert client.ready is None
        assert client.adapters[digest].residency == "disk"
        for attempt in (collect(client, prompts[0]), client.load(digest)):
            with pytest.raises(EngineFailure, match="engine is restarting") as failure:
                await attempt
            assert failure.value.error.code == "overloaded"
        await until(lambda: client.ready is not None)
        assert client.restarts == 1
        assert client.pid != first
        assert not psutil.pid_exists(first), "no zombie is left"
        assert tokens(await collect(client, prompts[0], digest)) == want
        await refused_as_queued(client, "closed")
        assert tokens(await collect(client, prompts[0], digest, tenant="gone")) == want
        client.forget_tenant("closed")
        assert tokens(await collect(client, prompts[0], digest, tenant="closed")) == want

        # Death while nothing runs is noticed too; closing during the restart ends it all.
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.ready is None)
    assert client.pid is None


async def test_what_had_not_begun_when_the_engine_died_may_be_tried_again(
    base: Path, prompts: list[list[int]]
) -> None:
    """One runs, the others wait behind it: of these nothing was lost. Nor of a call that was not answered."""
    async with running(base, max_num_seqs=1) as client:
        assert client.ready is not None
        stats = client.stats
        assert stats.blocks_free == stats.blocks_total == client.ready.num_blocks
        tasks = [asyncio.create_task(collect(client, prompt, params=LONG)) for prompt in prompts[:3]]
        await until(lambda: client.stats.generated_tokens > 3 and client.stats.waiting == 2)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        call = asyncio.create_task(client.memory())
        begun, *others = await asyncio.gather(*tasks, call, return_exceptions=True)
        assert not isinstance(begun, BaseException)
        assert begun[-1].error.code == "internal_error"
        for other in others:
            assert isinstance(other, EngineFailure)
            assert other.error.code == "overloaded"
            assert "try again" in other.error.message
        assert client.stats.blocks_free == client.stats.blocks_total == stats.blocks_total


async def test_closing_ends_what_runs(base: Path, prompts: list[list[int]]) -> None:
    async with running(base) as client:
        tasks = [asyncio.create_task(collect(client, prompt, params=LONG)) for prompt in prompts[:3]]
        await until(lambda: client.stats.generated_tokens > 3)
    for outcome in await asyncio.gather(*tasks):
        assert outcome[-1].finish_reason == "error"
        assert outcome[-1].error is not None
        assert outcome[-1].error.code == "shutting_down"
    await client.close()


async def test_a_start_that_cannot_be_says_why(base: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    reports: list[Progress] = []
    client = EngineClient(EngineConfig(model=str(base), pool_memory=100), reports.append)
    with pytest.raises(EngineStartError, match="hold no block"):
        await client.start()
    assert reports[-1].done == reports[-1].total > 0
    assert client.pid is None
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_an_engine_that_dies_while_it_starts_is_reported(base: Path) -> None:
    client = EngineClient(EngineConfig(model=str(base), pool_memory=1 << 20))
    start = asyncio.create_task(client.start())
    await until(lambda: client.pid is not None)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineStartError, match="ended by signal 9"):
        await start


async def test_the_engine_ends_with_its_parent(base: Path) -> None:
    script = f"""
import asyncio, sys
from heddle.core.client import EngineClient
from heddle.core.config import EngineConfig

async def main():
    client = EngineClient(EngineConfig(model={str(base)!r}, pool_memory=1 << 20, backend="reference"))
    await client.start()
    assert "torch" not in sys.modules
    print(client.pid, flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    engine = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: not psutil.pid_exists(engine))
