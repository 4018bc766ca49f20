"""Whether grammars can be followed: tried out in a process of its own before the engine hears of them.

llguidance bounds most of what it does, but not all: some schemas of a few bytes would keep it busy for years.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import structlog

from ...core.text.check_grammars import Item, Verdict
from ..errors import ApiError

logger = structlog.get_logger(__name__)

PATIENCE = 3.0
"""Seconds that a check may take. What people write takes milliseconds."""
START_PATIENCE = 60.0
KNOWN = 1024
"""Good ones that are remembered, the last ones used."""


class GrammarChecker:
    """One process, started with the first check and after it had to be killed. Of one event loop.

    Checks wait for each other, and a tenant's own ones for each other first: so nobody waits for more than one
    check of every other tenant.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._arguments = [str(folder), str(vocab_size), *map(str, eos_token_ids)]
        self._process: _Process | None = None
        self._free = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._asking: asyncio.Task[Verdict | None] | None = None

    async def check(self, items: Sequence[Item], tenant: str) -> Verdict | None:
        """What is wrong with the first one that is no good."""
        names = [sha256(msgspec.json.encode(item)).digest() for item in items]
        if all(name in self._known for name in names):
            for name in names:
                self._known.move_to_end(name)
            return None
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        try:
            async with self._turns.setdefault(tenant, asyncio.Lock()):
                await self._free.acquire()
                # Who asked may leave; what the process answers must be read all the same.
                asking = self._asking = asyncio.create_task(self._ask(items))
                verdict = await asyncio.shield(asking)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._turns[tenant]
        if verdict is None:
            self._known.update(dict.fromkeys(names))
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return verdict

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._end()

    async def _ask(self, items: Sequence[Item]) -> Verdict | None:
        """Holds `_free`, and gives it back."""
        try:
            process = self._process or await self._start()
            answer = b""
            try:
                async with asyncio.timeout(PATIENCE):
                    process.writer.write(msgspec.json.encode(items) + b"\n")
                    await process.writer.drain()
                    answer = await process.reader.readline()
                reason = "trying it out takes more memory than there is for it"
            except TimeoutError:
                reason = f"trying it out takes longer than {PATIENCE:g} seconds"
            except ConnectionError:
                reason = "it could not be tried out"
            if answer:
                return msgspec.json.decode(answer, type=Verdict | None)
            logger.warning("a grammar was too much for its checker", reason=reason)
            await self._end()
            return Verdict(len(items) - 1, reason)
        finally:
            self._free.release()

    async def _start(self) -> _Process:
        self._process = process = await _Process.spawn(self._arguments)
        try:
            async with asyncio.timeout(START_PATIENCE):
                ready = await process.reader.readline() == b"ready\n"
        except TimeoutError:
            ready = False
        if not ready:
            await self._end()
            raise ApiError("internal_error", "grammars cannot be checked: the process for it does not start")
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


@dataclass(frozen=True)
class _Process:
    popen: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def spawn(cls, arguments: Sequence[str]) -> _Process:
        """Popen, not asyncio's subprocess: uvloop forks, which holds up its loop for a tenth of a second."""
        popen, ours = _start_process(arguments)
        return cls(popen, *await asyncio.open_unix_connection(sock=ours))

    async def end(self) -> None:
        self.popen.kill()
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
        await asyncio.to_thread(self.popen.wait)


def _start_process(arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    # -P: the working directory must not shadow installed packages.
    command = [sys.executable, "-P", "-m", "heddle.core.text.check_grammars", *arguments]
    with theirs:
        fd = theirs.fileno()
        return subprocess.Popen(command, stdin=fd, stdout=fd, stderr=subprocess.DEVNULL), ours
