"""The grammars of guided sequences: compiled beside the engine's thread, followed token by token.

Measured on the demo base's 49152 tokens (`python bench/grammar_masks.py`): a guided row costs 25 to 85 µs for its
mask and as much to apply it, up to 0.8 ms where a place in the grammar is met for the first time; compiling a grammar
takes 1 to 21 ms, a copy of a compiled one 10 µs. Rows without a grammar cost nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import numpy as np
from llguidance import LLMatcher

from ..messages import EngineError, Generate
from ..text.grammar import GrammarCompiler, GrammarError
from ..text.grammar_faults import reason
from .sampler import SamplingError

logger = logging.getLogger(__name__)

COMPILED = 32
"""Grammars that stay compiled, the last ones used; each takes up to a few MB."""


class OutOfGrammar(SamplingError):
    """The grammar cannot be followed any further: it is beyond what a step may cost."""


class Guide:
    """One sequence's place in its grammar.

    It is found by the tokens of the answer, of which a preempted sequence keeps all: so it stays right however
    often their KV is computed.
    """

    def __init__(self, start: LLMatcher, vocab_size: int) -> None:
        """`start`: the compiled grammar, which stays at its beginning."""
        self._start = start
        self._vocab_size = vocab_size
        self._matcher: LLMatcher | None = None
        self._taken = 0

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray:
        """Which tokens may follow: bool [vocab]. End tokens may where the answer is complete.

        Raises `OutOfGrammar`.
        """
        if self._matcher is None:
            self._matcher = self._start.deep_copy()
        if self._taken < len(output_token_ids):
            self._matcher.consume_tokens(list(output_token_ids[self._taken :]))
            self._taken = len(output_token_ids)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise OutOfGrammar(f"the grammar cannot be followed: {reason(self._matcher.get_error())}")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def take(self, token_id: int) -> bool:
        """Go on by the chosen token; true where the answer is complete and can only end."""
        assert self._matcher is not None, "a token is chosen among those allowed"
        self._matcher.consume_token(token_id)
        self._taken += 1
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammars:
    """Every guided sequence of one engine. All methods belong to the engine's thread; only compiling does not,
    so that a large grammar holds up nobody but those who wait for it.
    """

    def __init__(
        self, make_compiler: Callable[[], GrammarCompiler], vocab_size: int, wake: Callable[[], None] | None
    ) -> None:
        """`make_compiler` is called with the first grammar, in the compiling thread; so is `wake`, whenever
        `drain` has something."""
        self.guides: dict[int, Guide] = {}
        """By sequence key, of those that have been drained and not forgotten."""
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._wake = wake
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._waiting: dict[int, str] = {}
        self.by_tenant: Counter[str] = Counter()
        """Of them how many are whose."""
        self._lock = threading.Lock()
        self._turns: dict[str, deque[Generate]] = {}
        """What is to be compiled, by tenant; the next one's turn first."""
        self._done: SimpleQueue[tuple[Generate, LLMatcher | Exception]] = SimpleQueue()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def waiting(self) -> int:
        """Sequences whose grammar is being compiled, or waits for that."""
        return len(self._waiting)

    def begin(self, command: Generate) -> None:
        """Compile its grammar; `drain` has the command when that is done. Tenants take turns."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._waiting[command.key] = command.tenant
        self.by_tenant[command.tenant] += 1
        with self._lock:
            self._turns.setdefault(command.tenant, deque()).append(command)
        self._thread.submit(self._compile_next)

    def drain(self) -> list[tuple[Generate, EngineError | None]]:
        """Commands whose grammar is ready, or why it never will be."""
        ready: list[tuple[Generate, EngineError | None]] = []
        while self._waiting:
            try:
                command, outcome = self._done.get_nowait()
            except Empty:
                break
            if command.key not in self._waiting:
                continue  # aborted meanwhile
            self._wait_no_more(command.key)
            if isinstance(outcome, GrammarError):
                ready.append((command, EngineError("invalid_request", f"grammar: {outcome}", "grammar")))
            elif isinstance(outcome, Exception):
                logger.error("a grammar could not be compiled", exc_info=outcome)
                error = EngineError("internal_error", "the engine failed at this request's grammar")
                ready.append((command, error))
            else:
                self.guides[command.key] = Guide(outcome, self._vocab_size)
                ready.append((command, None))
        return ready

    def forget(self, keys: Iterable[int]) -> None:
        """These sequences are over; unknown keys are ignored."""
        for key in keys:
            self.guides.pop(key, None)
            self._wait_no_more(key)

    def _wait_no_more(self, key: int) -> None:
        tenant = self._waiting.pop(key, None)
        if tenant is not None:
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile_next(self) -> None:
        """In the thread: the next tenant's first one."""
        with self._lock:
            tenant = next(iter(self._turns))
            queue = self._turns.pop(tenant)
            command = queue.popleft()
            if queue:
                self._turns[tenant] = queue
        if command.key not in self._waiting:
            return  # aborted meanwhile
        assert command.params.grammar is not None
        try:
            outcome: LLMatcher | Exception = self._compile(command.params.grammar)
        except Exception as error:  # noqa: BLE001 - its request's end, which `drain` tells of
            outcome = error
        self._done.put((command, outcome))
        if self._wake is not None:
            self._wake()

    def _compile(self, grammar: str) -> LLMatcher:
        if self._compiler is None:
            self._compiler = self._make_compiler()
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = self._compiled[grammar] = self._compiler.compile(grammar)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return matcher
