"""What the control code of a step costs with many tenants and a long queue: CPU time, no model.

    python bench/scheduling.py [--tenants 1000] [--queued 10000] [--running 64] [--steps 500]

Every slot is taken and every step one sequence ends, another starts and a new one comes. Prints the mean of a
step's schedule and update, first come first served and fair, and what a sequence costs to submit.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from heddle.core.messages import Generate, TenantShare
from heddle.core.sampling_params import SamplingParams
from heddle.core.scheduling.block_pool import BlockPool
from heddle.core.scheduling.plan import Sampled, StepResult
from heddle.core.scheduling.restore_cost import RestoreCost
from heddle.core.scheduling.scheduler import Scheduler
from heddle.lora.residency import Residency

BLOCK_SIZE = 16
PROMPT = 32


class NoAdapters:
    """`AdapterMemory` of an engine whose requests name none."""

    def load_host(self, path: str) -> None:
        raise AssertionError("no request names an adapter")


class Traffic:
    """A scheduler with its slots and its queue full; the model's part of a step is left out."""

    def __init__(self, arguments: argparse.Namespace, fair: bool) -> None:
        blocks = arguments.blocks or 4 * arguments.running * (PROMPT + arguments.running) // BLOCK_SIZE
        pool = BlockPool(blocks)
        memory: Any = NoAdapters()
        residency = Residency(memory=memory, blocks=pool, num_slots=1, num_rows=1, host_bytes=1)
        self.random = random.Random(0)
        self.names = [f"tenant{number}" for number in range(arguments.tenants)]
        self.running = arguments.running
        self.keys = 0
        self.scheduler = Scheduler(
            pool=pool,
            residency=residency,
            block_size=BLOCK_SIZE,
            max_num_seqs=arguments.running,
            max_num_batched_tokens=2 * arguments.running + PROMPT,
            max_model_len=4096,
            max_queued=1 << 20,
            eos_token_ids=frozenset(),
            restore_cost=RestoreCost(1, 1.0, 1.0, "recompute"),
            fair=fair,
        )
        for name in self.names:
            self.scheduler.tenants.set(TenantShare(name=name, weight=self.random.choice([1.0, 2.0, 5.0])))
        began = time.process_time()
        for _ in range(arguments.queued):
            self.submit()
        self.submit_seconds = (time.process_time() - began) / arguments.queued
        for _ in range(2 * arguments.running):
            self.step()

    def submit(self) -> None:
        self.keys += 1
        command = Generate(
            key=self.keys,
            group=self.keys,
            prompt_token_ids=[self.random.randrange(1000) for _ in range(PROMPT)],
            params=SamplingParams(max_tokens=self.running, seed=0),
            tenant=self.random.choice(self.names),
        )
        assert self.scheduler.submit(command) is None

    def step(self) -> float:
        """Seconds of CPU time in schedule and update together."""
        began = time.process_time()
        plan = self.scheduler.schedule()
        seconds = time.process_time() - began
        assert plan is not None
        result = StepResult({chunk.sequence.key: Sampled(1) for chunk in plan.chunks if chunk.samples})
        began = time.process_time()
        outputs = self.scheduler.update(plan, result)
        seconds += time.process_time() - began
        for output in outputs:
            if output.finish_reason is not None:
                self.submit()
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--blocks", type=int, help="of the pool [enough for all that run]")
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    for fair in (False, True):
        traffic = Traffic(arguments, fair)
        seconds = sum(traffic.step() for _ in range(arguments.steps)) / arguments.steps
        preemptions = traffic.scheduler.stats()["preemptions"]
        print(
            f"{'fair' if fair else 'fcfs'}: a step {seconds * 1e6:.0f} us, a submission "
            f"{traffic.submit_seconds * 1e6:.0f} us; {preemptions} preemptions"
        )


if __name__ == "__main__":
    main()
