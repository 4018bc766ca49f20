"""What a request and a token cost the API process: CPU time, with an engine that computes nothing.

    python bench/api_cost.py [--rounds 5] [--log-level info] [--wait]

Three processes: the API server (`stub_server.py`), a stub of the engine that gives every running sequence a token a
step (`stub_engine.py`), and this one, which sends the load. Figures are the API process's CPU time (user and system,
all its threads) over what was done meanwhile, less what it uses when idle; neither the stub nor the load generator is
in them. Every figure is the least of its rounds, for noise only adds: other work on the machine makes caches cold,
which doubles them easily.

A request's figure is of a prompt of 8 words and an answer of 1 token; the others are slopes from there, to longer
prompts and longer answers.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import uvloop
from heddle.api.load_generator.client import Target
from heddle.api.load_generator.plan import Plan
from heddle.api.load_generator.run import measure
from heddle.api.load_generator.texts import random_texts
from heddle.bench.stub_server import Server, served

ADAPTERS = 16


@dataclass(frozen=True)
class Load:
    """Requests of one kind."""

    requests: int
    concurrency: int = 16
    words: int = 8
    tokens: int = 1
    chat: bool = False
    stream: bool = False
    adapters: int = 0

    async def send(self, url: str) -> None:
        target = Target(
            url=url,
            endpoint="chat" if self.chat else "completions",
            model="demo",
            adapter_field="adapter",
            ignore_eos=True,
            stream=self.stream,
        )
        plan = Plan(
            texts=random_texts(self.words, self.tokens, self.chat),
            adapters=[f"a{number}" for number in range(self.adapters)],
            requests=self.requests,
        )
        run = await measure(plan, target, self.concurrency)
        for sample in run.samples:
            if sample.error is not None or sample.completion_tokens != self.tokens:
                raise SystemExit(f"{self}: {sample.error}: {sample.message}")

    def cost(self, server: Server, rounds: int) -> float:
        """CPU seconds of the server for one request: the least of `rounds`."""
        uvloop.run(replace(self, requests=max(20, self.requests // 10)).send(server.url))
        figures = []
        for _ in range(rounds):
            cpu, wall = server.cpu_seconds(), time.perf_counter()
            uvloop.run(self.send(server.url))
            wall = time.perf_counter() - wall
            figures.append((server.cpu_seconds() - cpu - wall * server.idle_share) / self.requests)
        return min(figures)


PLAIN = Load(1500)
REQUESTS = {
    "completions": PLAIN,
    "completions, with an adapter": replace(PLAIN, adapters=ADAPTERS),
    "completions, 64 at a time": replace(PLAIN, concurrency=64),
    "completions, one at a time": replace(PLAIN, concurrency=1, requests=500),
    "completions, streamed": replace(PLAIN, stream=True),
    "chat": replace(PLAIN, chat=True),
    "chat, with an adapter": replace(PLAIN, chat=True, adapters=ADAPTERS),
}
LONG = Load(64, tokens=257)
TOKENS = {
    "not streamed, 16 at a time": LONG,
    "streamed, 64 at a time": replace(LONG, concurrency=64, stream=True),
    "streamed, chat, 64 at a time": replace(LONG, concurrency=64, stream=True, chat=True),
    "streamed, 16 at a time": replace(LONG, stream=True),
    "streamed, one at a time": replace(LONG, requests=4, concurrency=1, stream=True),
}


def print_row(name: str, seconds: float) -> None:
    print(f"{name:<40} {seconds * 1e6:8.1f}", flush=True)


def print_costs(server: Server, rounds: int) -> None:
    server.measure_idle()
    print(f"idle: {server.idle_share * 1000:.0f} ms CPU a second\n\n{'a request':<40}   us CPU")
    requests = {}
    for name, load in REQUESTS.items():
        requests[name] = load.cost(server, rounds)
        print_row(name, requests[name])
    print_row("  of it an adapter", requests["completions, with an adapter"] - requests["completions"])
    more = 120
    longer = replace(PLAIN, words=PLAIN.words + more).cost(server, rounds)
    print_row("  100 more words of prompt", (longer - requests["completions"]) / more * 100)
    print(f"\n{'a token':<40}   us CPU")
    for name, load in TOKENS.items():
        first = replace(load, tokens=1, requests=max(200, load.requests)).cost(server, rounds)
        print_row(name, (load.cost(server, rounds) - first) / (load.tokens - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--log-level", default="info", help="the server's; its access log is part of the cost"
    )
    parser.add_argument("--wait", action="store_true", help="print the process's id and wait, for a profiler")
    options = parser.parse_args()
    with served(step_seconds=0.004, log_level=options.log_level, adapters=ADAPTERS) as (server, _):
        if options.wait:
            input(f"API process {server.process.pid}; Enter goes on ")
        print_costs(server, options.rounds)


if __name__ == "__main__":
    main()
