"""Random operations against the control code, with every invariant checked after each of them."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from heddle.core.messages import TenantShare
from heddle.lora.adapter_memory import ResidencyError

OPERATIONS = int(os.environ.get("HEDDLE_WALK_OPERATIONS", "5000"))
"""Of each walk: 100,000 in all."""
FRESH_SEED = int(os.environ.get("HEDDLE_WALK_SEED", random.randrange(10**9)))
"""Another one in every run, told where a walk fails; set it to walk the same way again."""
SEEDS = (0, FRESH_SEED)
PATIENCE_LIMIT = 3000
"""Steps within which every sequence must have ended, whatever came after it."""

TENANTS = ("public", "acme", "zeta")

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {
        "blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "max_prompt_tokens": 40,
    },
    "tight": {
        "blocks": 14,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 9,
        "slots": 4,
        "rows": 16,
    },
    "tight, swapping": {
        "blocks": 14,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 9,
        "slots": 4,
        "rows": 16,
        "swap_slots": 200,
        "preemption": "auto",
    },
    "one at a time": {"blocks": 10, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 5},
    "slow copies": {
        "blocks": 24,
        "block_size": 2,
        "blocks_per_tick": 1,
        "slots": 3,
        "host_bytes": 6,
    },
    "no cache": {"blocks": 20, "block_size": 4, "prefix_caching": False, "max_num_batched_tokens": 16},
    "first come, first served": {"blocks": 14, "block_size": 4, "max_num_batched_tokens": 9, "fair": False},
    "no cache, swapping": {"blocks": 12, "block_size": 4, "prefix_caching": False, "swap_slots": 200},
    "little swap space": {"blocks": 12, "block_size": 4, "max_num_batched_tokens": 16, "swap_slots": 5},
    "few host bytes": {"blocks": 20, "block_size": 4, "host_bytes": 3, "rows": 14, "patience": 3},
    "tokens are blocks": {
        "blocks": 40,
        "block_size": 1,
        "max_num_batched_tokens": 7,
        "max_queued": 12,
        "swap_slots": 200,
    },
}


class Walk:
    """Draws operations; keeps only what it needs to draw sensible ones."""

    def __init__(self, engine: Any, seed: int, settings: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        order = list(range(settings["blocks"]))
        self.random.shuffle(order)
        self.engine = engine(manual_loads=True, order=order, **settings)
        self.size = settings["block_size"]
        self.capacity = settings["blocks"] * self.size
        self.refusals: dict[str, int] = {}
        self.names: list[list[str]] = []
        """The digests of each name's versions; the last is current."""
        self.heads = [[self.random.randrange(1, 60) for _ in range(4 * self.size + 3)] for _ in range(3)]
        self.known = self.squeezed = 0
        for _ in range(3):
            self.names.append([self.know()])

    def know(self) -> str:
        self.known += 1
        chance = self.random.random()
        digest = f"d{self.known}"
        self.engine.know(
            digest,
            self.random.randint(1, 4),
            rows=self.random.randint(1, 9),
            pinned=self.random.random() < 0.1,
            corrupt=chance < 0.1,
            unreadable=chance > 0.95,
        )
        return digest

    def register(self) -> None:
        self.names.append([self.know()])

    def replace(self) -> None:
        """A name gets new weights; the version before it stays usable."""
        self.random.choice(self.names).append(self.know())

    def roll_back(self) -> None:
        versions = self.random.choice(self.names)
        versions.append(versions.pop(self.random.randrange(len(versions))))

    def remove(self) -> None:
        """One version, or the name; requests that hold it go on."""
        versions = self.random.choice(self.names)
        gone = [versions.pop(self.random.randrange(len(versions)))]
        if self.random.random() < 0.3:
            gone += versions
            versions.clear()
        for digest in gone:
            self.engine.residency.forget(digest)
        self.names = [versions for versions in self.names if versions]
        if not self.names:
            self.register()

    def bring_back(self) -> None:
        """The same weights are registered again after they were removed."""
        digest = f"d{self.random.randint(1, self.known)}"
        if not any(digest in versions for versions in self.names):
            self.engine.residency.know(digest, digest)
            self.names.append([digest])

    def digest(self) -> str:
        versions = self.random.choice(self.names)
        return versions[-1] if self.random.random() < 0.8 else self.random.choice(versions)

    def prompt(self) -> list[int]:
        head = self.random.choice(self.heads)
        length = self.random.choice([1, 2, self.size, self.size + 1, 2 * self.size, 3 * self.size, len(head)])
        tail = [self.random.randrange(1, 60) for _ in range(self.random.choice([0, 0, 1, self.size]))]
        return head[:length] + tail

    def adapters(self) -> list[str | tuple[str, float]]:
        count = self.random.choice([0, 0, 1, 1, 1, 2])
        return [(self.digest(), self.random.choice([1.0, 1.0, 0.5])) for _ in range(count)]

    def submit(self) -> None:
        draw = self.random
        prompt, adapters = self.prompt(), self.adapters()
        params: dict[str, Any] = {"max_tokens": draw.choice([0, 1, 2, 5, 9, 20, None])}
        if draw.random() < 0.2:
            params["prompt_logprobs"] = 0
        if draw.random() < 0.5:
            params["ignore_eos"] = True
        if draw.random() < 0.1:
            params["stop_token_ids"] = (draw.randrange(61), draw.randrange(61))
        if draw.random() < 0.1 and params["max_tokens"]:
            params["min_tokens"] = draw.randint(1, params["max_tokens"])
        if params["max_tokens"] is None and draw.random() < 0.5:
            params["ignore_eos"] = False
        group = len(self.engine.received)
        for choice in range(draw.choice([1, 1, 1, 3])):
            answer = self.engine.submit(
                prompt,
                *adapters,
                group=group,
                seed=choice,
                tenant=draw.choice(TENANTS),
                on_cold=draw.choice(["wait", "wait", "wait", "reject"]),
                **params,
            )
            if not isinstance(answer, int):
                self.refusals[answer.code] = self.refusals.get(answer.code, 0) + 1

    def set_tenant(self) -> None:
        """Its weight and its limits change, whatever it has running and waiting; or it is forgotten."""
        draw, tenants = self.random, self.engine.scheduler.tenants
        name = draw.choice(TENANTS)
        if draw.random() < 0.3:
            tenants.forget(name)
            return
        share = TenantShare(
            name=name,
            weight=draw.choice([0.5, 1.0, 1.0, 3.0, 100.0]),
            pool_share=draw.choice([None, None, 0.1, 0.4, 1.0]),
            queued_requests=draw.choice([None, None, 2, 6]),
        )
        tenants.set(share)

    def abort(self) -> None:
        if self.engine.live:
            self.engine.abort(*self.random.sample(sorted(self.engine.live), 1), 10**9)

    def call(self, name: str, *arguments: Any) -> None:
        """A call that may be refused, with one of the codes it may be refused with."""
        codes = {
            "load": {"adapter_failed", "capacity_exceeded"},
            "evict": {"adapter_in_use"},
            "pin": {"adapter_failed", "pin_limit"},
        }
        try:
            getattr(self.engine.residency, name)(self.digest(), *arguments)
        except ResidencyError as error:
            refusal = error
        else:
            return
        assert refusal.code in codes[name], refusal
        self.refusals[refusal.code] = self.refusals.get(refusal.code, 0) + 1

    def step(self) -> None:
        def between(_: Any) -> None:
            if self.random.random() < 0.05:
                self.abort()
            if self.random.random() < 0.05:
                self.submit()
            if self.random.random() < 0.05:
                self.call("evict", "host")
            self.engine.scheduler.check_integrity()

        engine = self.engine
        ran = engine.step(fail=self.random.random() < 0.01, between=between)
        if not ran and engine.asleep:
            assert not engine.scheduler.has_work, "work is left and nothing moves"
        old = [record.steps for record in engine.live.values() if record.steps > PATIENCE_LIMIT]
        assert not old, "a sequence starves"

    def squeeze(self) -> None:
        """In the next step the youngest gives way to the first that goes on, as if that had found no block."""
        scheduler = self.engine.scheduler
        grow = type(scheduler)._grow

        def squeezed(sequence: Any) -> bool:
            scheduler.__dict__.pop("_grow")
            if scheduler._running[-1] is not sequence:
                scheduler._preempt(scheduler._running[-1])
                self.squeezed += 1
            return grow(scheduler, sequence)

        scheduler._grow = squeezed

    def finish_load(self) -> None:
        waiting = self.engine.executor.waiting
        if waiting:
            self.engine.executor.run(self.random.randrange(len(waiting)))

    def operation(self) -> None:
        draw = self.random.random()
        if draw < 0.02:
            self.squeeze()
        elif draw < 0.62:
            self.step()
        elif draw < 0.74:
            if len(self.engine.live) < 24:
                self.submit()
        elif draw < 0.90:
            self.finish_load()
        elif draw < 0.925:
            self.abort()
        elif draw < 0.94:
            self.call("load")
        elif draw < 0.96:
            self.call("evict", self.random.choice(["host", "disk"]))
        elif draw < 0.965:
            self.set_tenant()
        elif draw < 0.98:
            self.call("pin", self.random.random() < 0.5)
        else:
            changes = [self.register, self.replace, self.roll_back, self.remove, self.remove, self.bring_back]
            self.random.choice(changes)()

    def check(self) -> None:
        engine = self.engine
        engine.scheduler.check_integrity()
        engine.scheduler._queue.check_integrity()
        engine.counts()
        for state in engine.residency.drain_changes():
            assert (state.residency == "device") <= (state.blocks > 0)
        engine.residency.drain_loads()


@pytest.mark.parametrize("seed", SEEDS, ids=["fixed", f"HEDDLE_WALK_SEED={FRESH_SEED}"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_random_walk_keeps_every_invariant_and_every_answer(
    engine: Any, settings: dict[str, Any], seed: int
) -> None:
    walk = Walk(engine, seed, settings)
    for _ in range(OPERATIONS):
        walk.operation()
        walk.check()
    fake = walk.engine
    fake.manual_loads = False
    fake.finish()
    fake.check_at_rest()
    ended_well = 0
    for record in fake.received.values():
        if record.aborted:
            assert record.ends == 0
        elif record.error is not None:
            assert record.ends == 1
            assert record.error.code in ("adapter_failed", "internal_error")
        else:
            fake.check_answer(record)
            ended_well += 1
    assert ended_well > OPERATIONS // 50, "the walk served almost nothing"
    stats = fake.scheduler.stats()
    assert stats["swap_outs"] == 0 or settings.get("swap_slots")
    assert walk.squeezed or settings.get("max_num_seqs") == 1
    if settings.get("swap_slots", 0) > 100:
        assert stats["swap_ins"] > 0, "the walk swapped nothing"
    if settings.get("preemption") == "auto":
        assert stats["swap_outs"] < stats["preemptions"], "the walk computed nothing again"
