"""One tenant floods, a quiet one asks one thing at a time: how long the quiet one waits for its first token.

    python bench/fairness.py [--flood 200] [--quiet 40] [server flags, for instance --max-num-seqs 32]

A real server on the demo base in INT8, over HTTP, two tenants with keys of their own. Three rows: the quiet tenant
alone; beside the flood first come, first served; beside the flood with fair scheduling. The flood is sent at once, and
the quiet tenant asks again and again, with a pause between, as long as any of it is under way. Status 1 where an
answer failed, or where the fair p99 is above three times the p99 alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from heddle.core.checkpoint.demo import demo_base

ADMIN_KEY = "the key of the bench"
LIMIT = 3.0
"""How many times as long as alone the quiet tenant may wait."""
WARM_UP = 5
VOCAB = 40_000
"""Prompts are ids below it, drawn at random: none finds anything in the cache."""


class Tenant:
    """What one tenant asks, with its own key."""

    def __init__(self, url: str, name: str, weight: float = 1.0) -> None:
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        httpx.post(f"{url}/tenants", headers=admin, json={"name": name, "weight": weight}).raise_for_status()
        made = httpx.post(f"{url}/tenants/{name}/keys", headers=admin, json={}).raise_for_status().json()
        self.draw = random.Random(name)
        self.client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {made['key']}"},
            timeout=httpx.Timeout(1200),
            limits=httpx.Limits(max_connections=None),
        )

    def body(self, prompt: int, new: int) -> dict[str, Any]:
        ids = [self.draw.randrange(1000, VOCAB) for _ in range(prompt)]
        return {"prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True}

    async def ask(self, prompt: int, new: int) -> None:
        (await self.client.post("/v1/completions", json=self.body(prompt, new))).raise_for_status()

    async def first_token(self, prompt: int, new: int) -> float:
        """Seconds until the first event of a streamed answer, of which all is read."""
        body = self.body(prompt, new) | {"stream": True}
        began, first = time.perf_counter(), 0.0
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - began
                    if "error" in json.loads(line.removeprefix("data: ")):
                        raise SystemExit(f"an answer failed: {line}")
        return first


@contextmanager
def serving(base: Path, policy: str, flags: Sequence[str]) -> Iterator[str]:
    """The address of a server that runs as long as it is needed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="heddle-fairness-") as home:
        command = [
            sys.executable, "-P", "-m", "heddle.api.cli", "serve", base, "--port", port, "--quantization", "int8",
            "--served-model-name", "base", "--pool-memory", "512MiB", "--admin-key", ADMIN_KEY,
            "--scheduling-policy", policy, "--data-dir", Path(home, "data"), "--log-level", "warning", *flags,
        ]  # fmt: skip
        server = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            if not any(line.startswith("ready") for line in server.stdout):
                raise SystemExit("the server did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


async def measure(url: str, arguments: argparse.Namespace, *, alone: bool) -> tuple[list[float], list[float]]:
    """The quiet tenant's times to first token without the flood (where asked for) and beside it."""
    quiet, loud = Tenant(url, "quiet"), Tenant(url, "loud")

    async def once() -> float:
        seconds = await quiet.first_token(arguments.quiet_prompt, arguments.quiet_new)
        await asyncio.sleep(arguments.pause * quiet.draw.uniform(0.5, 1.5))
        return seconds

    for _ in range(WARM_UP):
        await once()
    times = [await once() for _ in range(arguments.quiet if alone else 0)]
    flood = asyncio.gather(*(loud.ask(arguments.prompt, arguments.new) for _ in range(arguments.flood)))
    await asyncio.sleep(0.5)
    beside = []
    while not flood.done():
        beside.append(await once())
    await flood
    await quiet.client.aclose()
    await loud.client.aclose()
    return times, beside


def row(name: str, seconds: Sequence[float]) -> float:
    """Print one line of the table; its p99."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    print(
        f"| {name} | {len(seconds)} | {cuts[49] * 1e3:.0f} | {cuts[98] * 1e3:.0f} | {max(seconds) * 1e3:.0f} |"
    )
    return cuts[98]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flood", type=int, default=200, help="requests sent at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each of these")
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--quiet", type=int, default=40, help="requests of the quiet tenant alone")
    parser.add_argument("--quiet-prompt", type=int, default=192)
    parser.add_argument("--quiet-new", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between its requests, on average")
    parser.add_argument("--skip-fcfs", action="store_true", help="leave the second row out")
    arguments, flags = parser.parse_known_args()
    base = demo_base()
    with serving(base, "fair", flags) as url:
        alone, fair = asyncio.run(measure(url, arguments, alone=True))
    fcfs: list[float] = []
    if not arguments.skip_fcfs:
        with serving(base, "fcfs", flags) as url:
            _, fcfs = asyncio.run(measure(url, arguments, alone=False))
    print("| the quiet tenant | requests | p50 ms | p99 ms | longest ms |\n|---|---|---|---|---|")
    limit = LIMIT * row("alone", alone)
    if fcfs:
        row("flooded, first come first served", fcfs)
    within = row("flooded, fair", fair) <= limit
    print(f"fair p99 {'within' if within else 'above'} {LIMIT:.0f} times the p99 alone")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
