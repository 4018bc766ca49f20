"""The threads that share a kernel's work: the caller and a few helpers, none of whom is ever waited for in vain.

OpenMP's teams end each loop with a barrier: while another process holds one core, the thread that should run there
is late and a loop of 50 microseconds takes a scheduler's turn, 4 to 20 milliseconds, a few hundred times a step.
Here the work is cut into parts. Each thread has a share of them, neighbours, and takes from the others' once its own
are done; a helper that does not run is not waited for: the caller does its parts too, but those a helper has begun.
Which thread computes a part changes nothing in the result.

So the same thread mostly works on the same rows from one kernel to the next and finds them in its caches. What has to
come from another core costs 50 ns a line where the two share a cache and 240 where not (a Zen 4, whose host moves a
virtual machine's two cores together and apart).

The agreement is one array of int64 words. A thread's ticket holds the number of the run and how many of its parts are
left; it is changed only by compare-and-swap, so whoever took a part knows that the run whose entry and arguments it
read was still on: the next one's are written when no part of this one is left.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .atomics import add, call, pause, read, replace, write
from .compiled import compiled, inner

FINISHED, FAILED, ENTRY, PACKED, PARTS, THREADS, BUSY, STOP, TICKETS = 0, 1, 16, 17, 18, 19, 32, 40, 48
"""Indices of the words, the tickets last; those that different threads write lie in different cache lines."""
APART = 16
"""Words from one ticket to the next."""
PART_BITS = 20
LEFT = (1 << PART_BITS) - 1
"""The bits of the ticket that count parts."""

SPINS = 2000
"""Waiting rounds before a helper sleeps: about 100 microseconds, more than the pause between two kernels of a step."""
NAPS = 500
"""Short sleeps before it returns to Python and waits to be called: about 50 milliseconds."""
NAP_MICROSECONDS = 50

_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@inner
def _take_parts(words, me):  # type: ignore[no-untyped-def]
    """Do parts of the run that is on, thread `me`'s own first, until none is left to take; how many."""
    count, threads = 0, words[THREADS]
    for step in range(threads):
        owner = (me + step) % threads
        while True:
            ticket = read(words, TICKETS + APART * owner)
            left = ticket & LEFT
            if left == 0:
                break
            entry, packed, parts = read(words, ENTRY), read(words, PACKED), read(words, PARTS)
            taken = max(1, left // 2)
            if replace(words, TICKETS + APART * owner, ticket, ticket - taken):
                first = parts * (owner + 1) // threads - left
                for part in range(first, first + taken):
                    if call(entry, packed, me << PART_BITS | part) != 0:
                        write(words, FAILED, 1)
                add(words, FINISHED, taken)
                count += taken
    return count


@inner
def _run_parts(words, parts, entry, packed):  # type: ignore[no-untyped-def]
    """Run all parts of one kernel call with whatever help there is. Raises MemoryError where one found no scratch.

    `words` is empty where there are no helpers; while they serve another caller this one does without.
    """
    if words.size == 0 or parts == 1 or not replace(words, BUSY, 0, 1):
        for part in range(parts):
            if call(entry, packed, part) != 0:
                raise MemoryError("no memory for a kernel's scratch")
        return
    run, threads = (read(words, TICKETS) >> PART_BITS) + 1, words[THREADS]
    write(words, ENTRY, entry)
    write(words, PACKED, packed)
    write(words, PARTS, parts)
    write(words, FINISHED, 0)
    write(words, FAILED, 0)
    for owner in range(threads - 1, -1, -1):
        own = parts * (owner + 1) // threads - parts * owner // threads
        write(words, TICKETS + APART * owner, run << PART_BITS | own)
    _take_parts(words, 0)
    rounds = 0
    while read(words, FINISHED) < parts:
        rounds += 1
        if rounds < SPINS:
            pause()
        else:
            _sched_yield()  # the helper may need this very core
    failed = read(words, FAILED) != 0
    write(words, BUSY, 0)
    if failed:
        raise MemoryError("no memory for a kernel's scratch")


@intrinsic
def share(typingctx: Any, words: Any, parts: Any, function: Any, arguments: Any) -> Any:
    """function(part, parts, *arguments) for every part from 0 to `parts`, by all threads of the team.

    `words` are `Team.words`, `function` is a compiled function, `arguments` a tuple; they travel to the helpers as the
    address of a copy on the caller's stack, which stays until all parts are done.
    """
    return _shared(words, parts, function, arguments, by_thread=False)


@intrinsic
def share_by_thread(typingctx: Any, words: Any, parts: Any, function: Any, arguments: Any) -> Any:
    """`share` for a function that is also told, first, which thread calls it: from 0 to `thread_count`."""
    return _shared(words, parts, function, arguments, by_thread=True)


def _shared(words: Any, parts: Any, function: Any, arguments: Any, by_thread: bool) -> Any:
    dispatcher = function.dispatcher
    packed_type = types.Tuple([types.int64, *arguments])

    @intrinsic
    def unpack(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return b.load(b.inttoptr(args[0], context.get_value_type(packed_type).as_pointer()))

        return packed_type(address), generate

    def entry(packed, part):  # type: ignore[no-untyped-def]
        dispatcher(part & LEFT, *unpack(packed))

    def entry_by_thread(packed, part):  # type: ignore[no-untyped-def]
        dispatcher(part >> PART_BITS, part & LEFT, *unpack(packed))

    entry = entry_by_thread if by_thread else entry
    # Symbols are shared between all that a process loads from the disk cache: one name, one function.
    tag = hashlib.sha256(str(arguments).encode()).hexdigest()[:16]
    entry.__qualname__ = f"share.{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}.{tag}"

    def run(words, parts, entry, packed):  # type: ignore[no-untyped-def]
        _run_parts(words, parts, entry, packed)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        compiled = context.compile_subroutine(b, entry, types.none(types.int64, types.int64))
        function = context.declare_function(b.module, compiled.fndesc)
        values = [
            _unowned(context, b, kind, value)
            for kind, value in zip(packed_type, [args[1], *cgutils.unpack_tuple(b, args[3])], strict=True)
        ]
        packed = cgutils.alloca_once_value(b, context.make_tuple(b, packed_type, values))
        word = context.get_value_type(types.int64)
        addresses = [b.ptrtoint(pointer, word) for pointer in (function, packed)]
        signature = types.none(signature.args[0], types.int64, types.int64, types.int64)
        context.compile_internal(b, run, signature, [args[0], args[1], *addresses])
        return context.get_dummy_value()

    return types.none(words, types.int64, function, arguments), generate


def _unowned(context: Any, b: Any, kind: Any, value: Any) -> Any:
    """An array without its reference count, anything else as it is. Whoever calls `share` holds the array; to count
    references in two threads cost 3 us a part where they had no cache in common (a Zen 4)."""
    if not isinstance(kind, types.Array):
        return value
    array = context.make_array(kind)(context, b, value)
    for owner in ("meminfo", "parent"):
        setattr(array, owner, getattr(array, owner).type(None))
    return array._getvalue()


@inner
def spaced(count):  # type: ignore[no-untyped-def]
    """Zeros of int64, element i * `APART` for thread i, in cache lines of their own."""
    return np.zeros(count * APART, np.int64)


@inner
def thread_count(words):  # type: ignore[no-untyped-def]
    """Threads of the team whose words these are."""
    return words[THREADS] if words.size else 1


@inner
def ends_share(part, parts, threads):  # type: ignore[no-untyped-def]
    """Whether some thread's own parts end with this one: what it does next nobody knows."""
    owners = ((part + 1) * threads + parts - 1) // parts  # whose shares hold the parts up to this one
    return parts * owners // threads == part + 1


@compiled
def _help(words, me):  # type: ignore[no-untyped-def]
    """Helper `me`'s life between two sleeps in Python."""
    idle = 0
    while read(words, STOP) == 0 and idle < SPINS + NAPS:
        if read(words, TICKETS + APART * me) & LEFT and _take_parts(words, me):
            idle = 0
        elif idle < SPINS:
            pause()
        else:
            _usleep(NAP_MICROSECONDS)
        idle += 1


class Team:
    """The helpers of one process, for whichever of its threads calls a kernel."""

    def __init__(self) -> None:
        self._words: np.ndarray | None = None
        self._helpers: list[threading.Thread] = []
        self._call = threading.Event()
        self._someone_waits = False

    @property
    def words(self) -> np.ndarray:
        """What `share` needs; calls back helpers that went to sleep. Unless resized, as many threads as torch."""
        if self._words is None:
            self.resize(torch.get_num_threads())
            assert self._words is not None
        if self._someone_waits:
            self._someone_waits = False
            self._call.set()
        return self._words

    @property
    def num_threads(self) -> int:
        return len(self._helpers) + 1

    def resize(self, num_threads: int) -> None:
        """Have `num_threads` threads, the caller's among them."""
        if self._words is not None and num_threads == self.num_threads:
            return
        if self._words is not None and self._helpers:
            self._words[STOP] = 1
            self._call.set()
            for helper in self._helpers:
                helper.join()
        self._words = np.zeros(TICKETS + APART * num_threads if num_threads > 1 else 0, np.int64)
        self._words[THREADS : THREADS + 1] = num_threads
        self._helpers = [
            threading.Thread(
                target=self._help, args=(self._words, i), name=f"heddle-kernels-{i}", daemon=True
            )
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def _help(self, words: np.ndarray, number: int) -> None:
        while not words[STOP]:
            _help(words, number)
            self._call.clear()
            self._someone_waits = True
            if not words[STOP]:
                self._call.wait()


TEAM = Team()
"""Threads belong to the process, as torch's own do."""
atexit.register(TEAM.resize, 1)


def set_num_threads(count: int) -> int:
    """Let kernels run on `count` threads, at most as many as this process has cores; returns how many.

    torch's own operations then keep to the calling thread: two pools would take the cores from each other, and what
    is left to torch is small.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    TEAM.resize(max(1, min(count, cores)))
    torch.set_num_threads(1)
    return TEAM.num_threads
