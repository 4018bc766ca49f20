"""For how long the API's event loop is kept from its work under loads that are known to be heavy.

    python bench/loop_lag.py [--only NAME …] [--adapters 1000] [--upload 500000000] [--switch SECONDS]

The API process runs on a stub of the engine (`stub_server.py`); 64 streams of it run all the time, a token every
10 ms, and the load comes on top. A timer in its loop should be on time every 5 ms: `worst` is by how much it was not,
less the time for which the loop's thread could have run and other processes had the cores; `computing` is what it did
itself meanwhile, the rest it waited: for a lock, for a disk. `with others` is the worst of all, other processes' part
included: on a machine with nothing else to do the two are one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from heddle.api.load_generator.client import Target
from heddle.api.load_generator.plan import Plan, Text
from heddle.api.load_generator.run import measure
from heddle.api.load_generator.texts import words
from heddle.bench.stub_server import make_large_adapter, served

STREAMS = 64
TICK = 0.005
WATCH = """
import asyncio, os, time
from heddle.api import loop_lag
import threading
file = os.open({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
schedule = os.open("/proc/self/task/%d/schedstat" % threading.get_native_id(), os.O_RDONLY)

def used():
    computed, queued, _ = os.pread(schedule, 100, 0).split()  # nanoseconds on a core, and waiting for one
    return int(computed) / 1e9, int(queued) / 1e9

async def watch(observe):
    while True:
        due, (computed, queued) = time.monotonic() + {tick}, used()
        await asyncio.sleep({tick})
        late = time.monotonic() - due
        if late > 0.002:
            now = used()
            cells = time.time(), late, now[0] - computed, now[1] - queued
            os.write(file, b"%.4f %.4f %.4f %.4f\\n" % cells)

loop_lag.watch = watch
"""
SWITCH = """
from heddle.api import server
server.SWITCH_SECONDS = {seconds}
"""

Work = Callable[["Bench"], Awaitable[None]]


@dataclass
class Bench:
    """What the loads need."""

    session: aiohttp.ClientSession
    url: str
    sources: Path

    async def post(self, path: str, body: Any) -> None:
        data = json.dumps(body).encode() if not isinstance(body, bytes) else body
        headers = {"Content-Type": "application/json"}
        async with self.session.post(f"{self.url}{path}", data=data, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 500:
                raise SystemExit(f"{path}: {answer.status} {text[:300]}")

    async def get(self, path: str) -> None:
        async with self.session.get(f"{self.url}{path}") as answer:
            await answer.read()
            answer.raise_for_status()


async def nothing(bench: Bench) -> None:
    await asyncio.sleep(2)


async def large_upload(bench: Bench) -> None:
    folder = bench.sources / "large"
    form = aiohttp.FormData()
    form.add_field("name", "large")
    form.add_field("preload", "false")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        form.add_field("files", (folder / file).open("rb"), filename=file)
    async with bench.session.post(f"{bench.url}/adapters", data=form) as answer:
        if answer.status != 201:
            raise SystemExit(f"upload: {answer.status} {await answer.text()}")


async def registrations(bench: Bench) -> None:
    """100 at once."""
    await asyncio.gather(*(bench.post("/adapters", {"name": f"r{n}", "source": f"a{n}"}) for n in range(100)))


async def listings(bench: Bench) -> None:
    for _ in range(5):
        await asyncio.gather(bench.get("/adapters"), bench.get("/v1/models"))


def text_of(characters: int) -> str:
    return words(characters // 4, random.Random(0))[:characters]


async def huge_chats(bench: Bench) -> None:
    """Four of 8 MB at once; refused, for the context holds less."""
    body = {"messages": [{"role": "user", "content": text_of(8_000_000)}], "max_tokens": 1}
    await asyncio.gather(*(bench.post("/v1/chat/completions", body) for _ in range(4)))


async def many_messages(bench: Bench) -> None:
    """8 MB of short messages."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(200_000)]
    await bench.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


async def many_prompts(bench: Bench) -> None:
    """1,024 in a list, each with two answers, whole and streamed."""
    for stream in (False, True):
        prompts = [text_of(200)] * 1024
        body = {"prompt": prompts, "n": 2, "max_tokens": 8, "ignore_eos": True, "stream": stream}
        await bench.post("/v1/completions", body)


async def many_token_ids(bench: Bench) -> None:
    """A list of a million ids; refused, for the context holds less."""
    await bench.post("/v1/completions", {"prompt": [1000] * 1_000_000, "max_tokens": 1})


async def long_tokenize(bench: Bench) -> None:
    for strings in (False, True):
        await bench.post("/tokenize", {"prompt": text_of(1_000_000), "return_token_strs": strings})


async def log_probabilities(bench: Bench) -> None:
    """128 answers with 20 alternatives a token, and the prompt's."""
    body = {"prompt": text_of(2000), "n": 128, "max_tokens": 64, "ignore_eos": True, "logprobs": 20}
    await bench.post("/v1/completions", body)


LOADS: dict[str, Work] = {
    "64 streams alone": nothing,
    "an upload of 500 MB": large_upload,
    "registration of 100 adapters": registrations,
    "listing 1,000 adapters": listings,
    "chat bodies of 8 MB": huge_chats,
    "200,000 messages": many_messages,
    "1,024 prompts in a list, n = 2": many_prompts,
    "a million token ids": many_token_ids,
    "tokenising 1 MB": long_tokenize,
    "n = 128 with logprobs": log_probabilities,
}


async def streams(url: str, stop: asyncio.Event) -> None:
    """Keep STREAMS going until told otherwise."""
    target = Target(url=url, model="demo", ignore_eos=True)

    def texts(draw: random.Random) -> Iterator[Text]:
        """Of many lengths, so that they do not all begin and end together."""
        while not stop.is_set():
            yield Text(words(8, draw), draw.randrange(50, 500))

    await measure(Plan(texts=texts), target, STREAMS)


@dataclass(frozen=True)
class Lag:
    """Seconds."""

    at: float
    late: float
    computing: float
    queued: float

    @property
    def own(self) -> float:
        return max(0.0, self.late - self.queued)


def read(log: Path) -> list[Lag]:
    return [Lag(*map(float, line.split())) for line in log.read_text().splitlines()]


async def run(bench: Bench, only: list[str], log: Path) -> None:
    print(f"{'load':<36} {'seconds':>8} {'worst':>10} {'computing':>11} {'over 50':>8} {'with others':>12}")
    stop = asyncio.Event()
    flow = asyncio.create_task(streams(bench.url, stop))
    for name, load in LOADS.items():
        if only and not any(part in name for part in only):
            continue
        await asyncio.sleep(0.5)
        began = time.time()
        await load(bench)
        took = time.time() - began
        await asyncio.sleep(0.3)
        during = [lag for lag in read(log) if began <= lag.at <= began + took + 0.3] or [Lag(0, 0, 0, 0)]
        worst = max(during, key=lambda lag: lag.own)
        print(
            f"{name:<36} {took:8.1f} {worst.own * 1e3:7.1f} ms {worst.computing * 1e3:8.1f} ms "
            f"{sum(lag.own > 0.05 for lag in during):>8} {max(lag.late for lag in during) * 1e3:9.1f} ms",
            flush=True,
        )
    stop.set()
    await flow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", default=[], help="loads with one of these words in their name")
    parser.add_argument("--adapters", type=int, default=1000, help="registered before")
    parser.add_argument("--upload", type=int, default=500_000_000, help="bytes")
    parser.add_argument(
        "--switch", type=float, help="the interpreter's switch interval, in place of the server's"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "lags"
        extra = WATCH.format(path=str(log), tick=TICK)
        if options.switch is not None:
            extra += SWITCH.format(seconds=options.switch)
        with served(0.01, adapters=options.adapters, extra=extra) as (server, sources):
            if not options.only or any(part in "an upload of 500 MB" for part in options.only):
                make_large_adapter(sources / "large", options.upload)

            async def everything() -> None:
                timeout = aiohttp.ClientTimeout(total=300)
                async with aiohttp.ClientSession(timeout=timeout) as session:
                    await run(Bench(session, server.url, sources), options.only, log)

            uvloop.run(everything())


if __name__ == "__main__":
    main()
