"""What the prefix cache gains where prompts begin alike, and what it costs where none do, on the demo base.

    python bench/prefix_cache.py [--quantization int8] [--prefix 512] [--repeats 32] [--rounds 7]

Hits: the same prefix with another 8 tokens behind it, one request at a time; time to the first token of the first
request over the median of the later ones. No hits: random prompts as long as the prefix, 8 at a time, 16 new tokens
each, on an engine with the cache and one without, in turn; the median of the rounds' ratios. Before that the pool is
filled once: a cache keeps blocks, so the next request writes to memory that nobody has touched, until there is none
left. Beside it, the time the cache's own code took in those rounds: what remains of the ratio is noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from heddle import LLM, SamplingParams
from heddle.core.checkpoint.demo import demo_base
from heddle.core.scheduling.prefix_cache import PrefixCache

TAIL, STREAMS, NEW = 8, 8, 16


class Watched(PrefixCache):
    """Counts the seconds spent in it."""

    seconds = 0.0

    def match(self, *arguments: Any) -> Any:
        return self._timed(super().match, *arguments)

    def publish(self, *arguments: Any) -> Any:
        return self._timed(super().publish, *arguments)

    def publish_part(self, *arguments: Any) -> Any:
        return super().publish_part(*arguments)  # called within publish too: not counted twice

    def _timed(self, method: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            Watched.seconds += time.perf_counter() - began


def tokens(count: int) -> list[int]:
    """Token ids nobody has in a cache."""
    return [random.randrange(1000, 40000) for _ in range(count)]


def start(quantization: Any, caching: bool) -> LLM:
    return LLM(
        str(demo_base()), quantization=quantization, enable_prefix_caching=caching, pool_memory="512MiB"
    )


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were found."""
    began = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    return time.perf_counter() - began, output.cached_tokens


def hits(llm: LLM, prefix: list[int], repeats: int) -> None:
    first_token(llm, tokens(len(prefix) + TAIL))  # whatever is compiled at first use
    times, found = zip(*(first_token(llm, [*prefix, *tokens(TAIL)]) for _ in range(repeats)))
    later, slowest = statistics.median(times[1:]), max(times[1:])
    print(
        f"same {len(prefix)}-token prefix, {repeats} times; cached_tokens {found[0]}, then {set(found[1:])}"
    )
    print(f"  first {times[0] * 1000:.1f} ms, later {later * 1000:.1f} ms (slowest {slowest * 1000:.1f} ms)")
    print(f"  later ones are {times[0] / later:.1f} times as fast (the slowest {times[0] / slowest:.1f})")


def misses(cached: LLM, plain: LLM, length: int, rounds: int) -> None:
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    ratios, shares = [], []
    while cached._engine._blocks.counts()["free"] > 0:
        cached.generate([tokens(length) for _ in range(STREAMS)], params)
    plain.generate([tokens(length) for _ in range(STREAMS)], params)
    for _ in range(rounds):
        prompts = [tokens(length) for _ in range(STREAMS)]
        seconds = {}
        for llm in random.sample([cached, plain], 2):
            Watched.seconds, began = 0.0, time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds[llm] = time.perf_counter() - began
            assert not any(output.cached_tokens for output in outputs)
            if llm is cached:
                shares.append(Watched.seconds / seconds[llm])
        ratios.append(seconds[cached] / seconds[plain])
    print(f"no hits: {STREAMS} random prompts of {length} tokens, {NEW} new ones each, {rounds} rounds")
    print(f"  with the cache {100 * (statistics.median(ratios) - 1):+.2f} % of the time without it")
    print(f"  of which its own code {100 * statistics.median(shares):.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cached, plain = (start(options.quantization, caching) for caching in (True, False))
    cached._engine._scheduler._cache.__class__ = Watched
    hits(cached, tokens(options.prefix), options.repeats)
    misses(cached, plain, options.prefix, options.rounds)


if __name__ == "__main__":
    main()
