"""Tenants with endless traffic on the real control code; what each is given is counted from outside."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from heddle.core.messages import TenantShare

INPUT, OUTPUT = 1.0, 2.0
"""The paper's weights of a prompt token computed and of a token generated."""
ADAPTER_BLOCKS = 2


def tokens(count: int, start: int = 1) -> list[int]:
    return [(start + index) % 60 + 1 for index in range(count)]


@dataclass(frozen=True)
class Traffic:
    """Of one tenant that always has sequences waiting: the range of its prompts and answers, in tokens."""

    prompts: tuple[int, int] = (1, 12)
    answers: tuple[int, int] = (1, 12)
    weight: float = 1.0
    adapters: int = 0
    """So many of its own, drawn at random; 0: the base."""


class Simulation:
    """One step after another. `service`: units of prompt tokens computed for the first time, of tokens generated,
    and of adapters' blocks that were moved, by tenant."""

    def __init__(self, fake: Any, traffic: dict[str, Traffic], seed: int, backlog: int = 6) -> None:
        self.fake = fake
        self.traffic = traffic
        self.random = random.Random(seed)
        self.backlog = backlog
        self.service: Counter[str] = Counter()
        self.computed: Counter[int] = Counter()
        self.longest_prompt = 0
        self.block_units = 1 / fake.scheduler._swapper.cost.token_cost
        for name, of in traffic.items():
            fake.scheduler.tenants.set(TenantShare(name=name, weight=of.weight))
            for index in range(of.adapters):
                fake.know(f"{name} {index}", blocks=ADAPTER_BLOCKS)

    def submit(self, name: str) -> int:
        of, draw = self.traffic[name], self.random
        count = draw.randint(*of.prompts)
        self.longest_prompt = max(self.longest_prompt, count)
        key = self.fake.submit(
            [draw.randrange(1, 60) for _ in range(count)],
            *([f"{name} {draw.randrange(of.adapters)}"] if of.adapters else []),
            tenant=name,
            max_tokens=draw.randint(*of.answers),
            ignore_eos=True,
        )
        assert isinstance(key, int)
        return key

    def waiting(self, name: str) -> int:
        return sum(not one.started for one in self.fake.scheduler._queue if one.tenant == name)

    def step(self) -> None:
        for name in self.traffic:
            for _ in range(self.backlog - self.waiting(name)):
                self.submit(name)
        records = dict(self.fake.live)
        before = {key: len(record.token_ids) for key, record in records.items()}
        self.fake.device.new_pages.clear()
        self.fake.step()
        self.fake.scheduler.check_integrity()
        for digest in self.fake.device.new_pages:
            self.service[digest.split()[0]] += self.block_units
        for key, record in records.items():
            self.service[record.command.tenant] += OUTPUT * (len(record.token_ids) - before[key])
        for chunk in self.fake.last_plan.chunks if self.fake.last_plan else ():
            sequence = chunk.sequence
            stop = min(chunk.start + len(chunk.token_ids), len(sequence.prompt_token_ids))
            new = stop - max(
                chunk.start, self.computed[sequence.key]
            )  # what is computed once more is no service
            if new > 0:
                self.service[sequence.tenant] += INPUT * new
                self.computed[sequence.key] = stop

    def run(self, steps: int) -> list[dict[str, float]]:
        """Service over weight of each tenant after every step."""
        history = []
        for _ in range(steps):
            self.step()
            history.append({name: self.service[name] / of.weight for name, of in self.traffic.items()})
        return history

    @property
    def bound(self) -> float:
        """The paper's, Theorem 4.4: 2 max(wp Linput, wq M). A sequence's adapter counts with its prompt."""
        adapter = max(of.adapters > 0 for of in self.traffic.values()) * ADAPTER_BLOCKS * self.block_units
        capacity = self.fake.pool.total * self.fake.device.block_size
        return 2 * max(INPUT * self.longest_prompt + adapter, OUTPUT * capacity)


def widest(history: list[dict[str, float]], one: str, other: str) -> float:
    """The largest difference of service of two tenants over any interval."""
    differences = [0.0, *(given[one] - given[other] for given in history)]
    return max(differences) - min(differences)
