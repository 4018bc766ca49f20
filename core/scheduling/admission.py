"""Which waiting sequences start now, and whose adapters come to the device for that. No torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from ...lora.adapter_entry import Placing
from ...lora.residency import Residency
from .acceptance import Acceptance
from .block_pool import BlockPool
from .fair_queue import INPUT_UNITS, OUTPUT_UNITS
from .fence import Fence, Need
from .making_way import MakingWay
from .prefix_cache import Hit, PrefixCache
from .queue_policy import QueuePolicy
from .sequence import Sequence, Status
from .swapper import Swapper
from .tenants import Account, Tenants

MAX_FAILED_PLACEMENTS = 16
"""Placements that find no room in one pass: the rest of a long queue is then not tried in vain."""
MAX_TENANTS_WITHOUT_ROOM = 16
"""Tenants whose first sequences do not fit beside one that lacks blocks: the pass ends then."""


class Admission:
    """One pass over the queue a step, in its order.

    - A sequence whose adapters are on the device starts when there are blocks for all its tokens so far, and
      one more for every running sequence; where slots or blocks are short, others may have to make way for it
      (`MakingWay`). While it lacks blocks nobody of its tenant starts, and its room is kept as behind the fence;
      nor does a tenant that was given more by half of what the paper's bound allows.
    - A sequence whose adapters are not there is passed over. Its adapters get their blocks when they and its
      tokens fit, at the cost of adapters wanted only behind it in the queue.
    - Who has lacked nothing but that room for `patience` steps owns the fence: see `Fence`.
    - A sequence whose prompt is being computed by another of its group waits, and finds it in the cache.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        cache: PrefixCache,
        swapper: Swapper,
        residency: Residency,
        acceptance: Acceptance,
        queue: QueuePolicy,
        tenants: Tenants,
        way: MakingWay,
        max_num_seqs: int,
        patience: int,
        preempt: Callable[[Sequence], None],
        outgrown: Callable[[Sequence], None],
    ) -> None:
        """`preempt`: called for who makes way. `outgrown`: for one that could never resume since pins took its
        room."""
        self._pool = pool
        self._cache = cache
        self._swapper = swapper
        self._residency = residency
        self._acceptance = acceptance
        self._queue = queue
        self._tenants = tenants
        self._way = way
        self._max_num_seqs = max_num_seqs
        self._patience = patience
        self._preempt = preempt
        self._outgrown = outgrown
        self._lead = OUTPUT_UNITS * pool.total * acceptance.block_size / 2
        self.fence = Fence(residency)
        self._asked: dict[str, int] = {}  # digest of a load asked for -> the step it was first seen

    def admit(
        self, running: list[Sequence], step: int, has_rows: Callable[[Sequence], bool]
    ) -> Iterator[Sequence]:
        """Move sequences from the queue to `running` (ordered by arrival), yielding each. `has_rows`: whether
        the step has tokens left for this one, when its turn has come."""
        spare = self._serve_old_request(step)  # adapters of all seen so far: later ones leave them alone
        fenced = bool(spare)
        failed = 0
        first = True
        lacking: Account | None = None  # whose sequence was the first to lack blocks
        turned_away = 0
        for sequence in self._queue:
            if not has_rows(sequence):
                return
            account = self._tenants.account(sequence)
            if lacking is not None and (
                account.counter - lacking.counter > self._lead or turned_away == MAX_TENANTS_WITHOUT_ROOM
            ):
                return
            full = len(running) >= self._max_num_seqs
            if full and not self._way.claims_slot(account):
                return
            if sequence.open_ended and self._acceptance.room(sequence.digests) < len(sequence):
                self._outgrown(sequence)
                continue
            spare.update(sequence.digests)
            if fenced and not self.fence.lets(self._whole(sequence)):
                if lacking is not None:
                    self._queue.hold_back(sequence)
                    turned_away += 1
                continue
            old = sequence.blocked_since is not None and step - sequence.blocked_since >= self._patience
            headroom = 0 if old else len(running)
            if not self._residency.on_device(sequence.digests):
                leads = old and not fenced and self.fence.is_open(account.name)
                if leads or failed < MAX_FAILED_PLACEMENTS:
                    failed += not self._place(sequence, headroom, spare, step, urgent=first or leads)
                first = False
                if leads:
                    self.fence.raise_for(sequence.key, self._now(sequence), account.name)
                    fenced = True
                continue
            if self._cache.enabled and self._is_being_computed(sequence, running):
                continue
            growth = len(account.running) + 1
            if self._way.beyond_cap(account, self._acceptance.blocks(len(sequence)) + growth):
                self._queue.hold_back(sequence)
                continue
            if not self._start(sequence, running, headroom, spare, step):
                if full:
                    return
                self._queue.hold_back(sequence)
                turned_away += 1
                lacking = lacking or account
                fenced = self._keep_room(sequence, account, step, fenced)
                continue
            insort(running, sequence, key=lambda other: other.arrival)
            if self.fence.lower(sequence.key):
                fenced = False
            elif fenced:
                self.fence.admitted(sequence.key, self._whole(sequence))
            yield sequence

    def serve_requests(self, running: list[Sequence]) -> None:
        """Bring loads that were asked for on their way, as far as idle room goes."""
        for digest in list(self._residency.requests):
            self._residency.place((digest,), len(running), None)

    def _serve_old_request(self, step: int) -> set[str]:
        """A load asked for long ago goes before all sequences, and keeps the fence up: its digest, if any."""
        requests = self._residency.requests
        for digest in self._asked:
            if digest not in requests:
                self.fence.lower(digest)
        self._asked = {digest: self._asked.get(digest, step) for digest in requests}
        for digest, since in self._asked.items():
            if step - since >= self._patience:
                self.fence.raise_for(digest, Need((digest,), 0))
                self._residency.place((digest,), 0, (), urgent=True)
                return {digest}
        return set()

    def _place(self, sequence: Sequence, headroom: int, spare: set[str], step: int, *, urgent: bool) -> bool:
        """Move its adapters on towards the device; False where there is no room for them."""
        beside = self._acceptance.blocks(len(sequence)) + headroom
        places = self._residency.places
        before = places.blocks_placed
        placing = self._residency.place(sequence.digests, beside, spare, urgent)
        if places.blocks_placed > before:
            self._queue.charge(sequence, (places.blocks_placed - before) / self._swapper.cost.token_cost)
        if placing is not Placing.NO_ROOM:
            return True
        if sequence.blocked_since is None:
            sequence.blocked_since = step
        return False

    def _keep_room(self, sequence: Sequence, account: Account, step: int, fenced: bool) -> bool:
        """It lacks blocks: other tenants' sequences may start as long as they leave it the room for its own.
        True: the fence is up."""
        if self._tenants.alone(account):
            return fenced
        if sequence.blocked_since is None:
            sequence.blocked_since = step
        if fenced or not self.fence.is_open(account.name):
            return fenced
        self.fence.raise_for(sequence.key, self._now(sequence), account.name)
        return True

    def _start(
        self, sequence: Sequence, running: list[Sequence], headroom: int, spare: set[str], step: int
    ) -> bool:
        """Give it its blocks, where others have to make way too; False, and nothing changed, where there are too
        few, or no slot."""
        account = self._tenants.account(sequence)
        blocks, size = self._acceptance.blocks(len(sequence)), self._acceptance.block_size
        hit = self._cache.match(sequence)
        found = len(hit.blocks)
        fresh = blocks - found
        if sequence.host_slots or self._pool.available_beside(hit.held) < fresh + headroom:
            hit = Hit(hit.blocks)  # it has more in swap space, or needs the room of what it would copy
        taken = self._pool.available - self._pool.available_beside(hit.held)
        if not self._make_room(sequence, running, fresh + taken, headroom, spare, step):
            return False
        table = self._pool.reserve(hit.held, fresh, account.name)
        assert table is not None
        if hit.part is not None:
            table.remove(hit.part)
        self._queue.remove(sequence)
        self._tenants.started(sequence)
        self._residency.hold(sequence.key)
        sequence.status = Status.RUNNING
        sequence.started_at = step
        sequence.block_table = table
        sequence.num_published = found
        sequence.num_computed = max(sequence.num_computed, found * size + hit.part_tokens)
        if sequence.host_slots:
            self._swapper.back(sequence, found)
        elif hit.part is not None:
            self._cache.copy(hit.part, table[found])
        sequence.blocked_since = None
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
            owed = len(sequence.prompt_token_ids) - sequence.num_computed
            self._queue.charge(sequence, INPUT_UNITS * owed)
        return True

    def _make_room(
        self,
        sequence: Sequence,
        running: list[Sequence],
        blocks: int,
        headroom: int,
        spare: set[str],
        step: int,
    ) -> bool:
        """A slot and so many blocks are there for it, and `headroom` blocks more unless others have to make way.
        False, and nothing changed, where that is not to be had."""
        full = len(running) >= self._max_num_seqs
        if not full and self._residency.give_way(blocks + headroom, spare):
            return True
        short = blocks - self._residency.places.within_reach(spare)
        victims = self._way.for_waiting(sequence, full, short, blocks, step)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        return self._residency.give_way(blocks, spare)

    def _is_being_computed(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """A running sequence of its group has the same prompt, and computes rows that could be found."""
        prompt = len(sequence.prompt_token_ids)
        if prompt == 1 or sequence.host_slots or sequence.owes_prompt_logprobs:
            return False
        return any(
            other.group == sequence.group
            and other.num_computed < prompt - 1
            and other.scope == sequence.scope
            and other.prompt_token_ids == sequence.prompt_token_ids
            for other in running
        )

    def _now(self, sequence: Sequence) -> Need:
        """What it needs to start."""
        return Need(sequence.digests, self._acceptance.blocks(len(sequence)))

    def _whole(self, sequence: Sequence) -> Need:
        """What it can come to need."""
        tokens = len(sequence.prompt_token_ids) + sequence.max_tokens
        return Need(sequence.digests, self._acceptance.blocks(tokens))
