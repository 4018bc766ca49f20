"""The threads that share a kernel's work: the caller and a few helpers, none of whom is ever waited for in vain.

OpenMP's teams end each loop with a barrier: while another process holds one core, the thread that should run there
is late and a loop of 50 microseconds takes a scheduler's turn, 4 to 20 milliseconds, a few hundred times a step.
Here the work is cut into parts that whoever has time takes from one counter. A helper that is not running takes
none, so the caller does them itself and waits only for parts that a helper has begun. Which thread computes a part
changes nothing in the result.

The agreement is one array of int64 words. `TICKET` holds the number of the run and the next part to take; it is
changed only by compare-and-swap, so whoever took a part knows that the run whose entry and arguments it read was
still on: the caller closes the ticket before it writes the next run's.
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

TICKET, FINISHED, FAILED, ENTRY, PACKED, PARTS, BUSY, STOP = 0, 16, 17, 32, 33, 34, 48, 56
"""Indices of the words; those that different threads write lie in different cache lines."""
WORDS = 64
PART_BITS = 20
LAST_PART = (1 << PART_BITS) - 1
"""As the next part: closed, nothing to take."""

SPINS = 2000
"""Waiting rounds before a helper sleeps: about 100 microseconds, more than the pause between two kernels of a step."""
NAPS = 500
"""Short sleeps before it returns to Python and waits to be called: about 50 milliseconds."""
NAP_MICROSECONDS = 50

_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@inner
def _take_parts(words):  # type: ignore[no-untyped-def]
    """Do parts of the run that is on, until none is left to take; how many."""
    count = 0
    while True:
        ticket = read(words, TICKET)
        entry, packed, parts = read(words, ENTRY), read(words, PACKED), read(words, PARTS)
        part = ticket & LAST_PART
        if part >= parts:
            return count
        if replace(words, TICKET, ticket, ticket + 1):
            if call(entry, packed, part) != 0:
                write(words, FAILED, 1)
            add(words, FINISHED, 1)
            count += 1


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
    run = (read(words, TICKET) >> PART_BITS) + 1
    write(words, TICKET, run << PART_BITS | LAST_PART)
    write(words, ENTRY, entry)
    write(words, PACKED, packed)
    write(words, PARTS, parts)
    write(words, FINISHED, 0)
    write(words, FAILED, 0)
    write(words, TICKET, run << PART_BITS)
    _take_parts(words)
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
    dispatcher = function.dispatcher
    packed_type = types.Tuple([types.int64, *arguments])

    @intrinsic
    def unpack(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            value = b.load(b.inttoptr(args[0], context.get_value_type(packed_type).as_pointer()))
            context.nrt.incref(b, packed_type, value)  # what a call returns is the receiver's to release
            return value

        return packed_type(address), generate

    def entry(packed, part):  # type: ignore[no-untyped-def]
        dispatcher(part, *unpack(packed))

    # Symbols are shared between all that a process loads from the disk cache: one name, one function.
    tag = hashlib.sha256(str(arguments).encode()).hexdigest()[:16]
    entry.__qualname__ = f"share.{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}.{tag}"

    def run(words, parts, entry, packed):  # type: ignore[no-untyped-def]
        _run_parts(words, parts, entry, packed)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        compiled = context.compile_subroutine(b, entry, types.none(types.int64, types.int64))
        function = context.declare_function(b.module, compiled.fndesc)
        values = [args[1], *cgutils.unpack_tuple(b, args[3])]
        packed = cgutils.alloca_once_value(b, context.make_tuple(b, packed_type, values))
        word = context.get_value_type(types.int64)
        addresses = [b.ptrtoint(pointer, word) for pointer in (function, packed)]
        signature = types.none(signature.args[0], types.int64, types.int64, types.int64)
        context.compile_internal(b, run, signature, [args[0], args[1], *addresses])
        return context.get_dummy_value()

    return types.none(words, types.int64, function, arguments), generate


@compiled
def _help(words):  # type: ignore[no-untyped-def]
    """A helper's life between two sleeps in Python."""
    idle = 0
    while read(words, STOP) == 0 and idle < SPINS + NAPS:
        if _take_parts(words):
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
        self._words = np.zeros(WORDS if num_threads > 1 else 0, np.int64)
        self._helpers = [
            threading.Thread(target=self._help, args=(self._words,), name=f"heddle-kernels-{i}", daemon=True)
            for i in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def _help(self, words: np.ndarray) -> None:
        while not words[STOP]:
            _help(words)
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
