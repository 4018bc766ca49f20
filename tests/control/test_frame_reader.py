"""Frames come out whole and in order, however the socket cuts them, and leave the loop to others now and then."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from heddle.core.engine import frame_reader
from heddle.core.engine.frame_reader import FrameReader
from heddle.core.messages import HEADER

BODIES = [b"a", b"", b"bc" * 40_000, b"d" * 7]
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


@asynccontextmanager
async def reading(take: Callable[[memoryview], None]) -> AsyncIterator[tuple[FrameReader, socket.socket]]:
    """A reader, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_unix_connection(FrameReader, sock=ours)
    reader.listen(take)
    try:
        yield reader, theirs
    finally:
        theirs.close()
        transport.close()


@pytest.mark.parametrize("size", [1, 3, 5, 64, 10**6])
def test_frames_are_whole_wherever_the_data_was_cut(size):
    taken: list[bytes] = []
    data = b"".join(map(framed, BODIES))
    reader = FrameReader()
    reader.listen(lambda body: taken.append(bytes(body)))
    for begin in range(0, len(data), size):
        reader.data_received(data[begin : begin + size])
    assert taken == BODIES


def test_what_came_before_anybody_listened_is_not_lost():
    taken: list[bytes] = []
    reader = FrameReader()
    reader.data_received(framed(b"early") + framed(b"late")[:3])
    reader.listen(lambda body: taken.append(bytes(body)))
    assert taken == [b"early"]
    reader.data_received(framed(b"late")[3:])
    assert taken == [b"early", b"late"]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_what_came_before_the_end_is_handed_on_and_then_the_end_is_known(new_loop):
    async def main() -> list[bytes]:
        taken: list[bytes] = []
        async with reading(lambda body: taken.append(bytes(body))) as (reader, theirs):
            theirs.sendall(framed(b"one") + framed(b"two") + framed(b"never whole")[:-1])
            theirs.close()
            async with asyncio.timeout(10):
                await reader.ended.wait()
        return taken

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(main()) == [b"one", b"two"]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_what_has_piled_up_is_gone_through_in_turns_with_other_work(new_loop, monkeypatch):
    """Every frame takes a whole turn here."""
    monkeypatch.setattr(frame_reader, "TURN_SECONDS", -1.0)
    count = 50

    async def main() -> tuple[list[bytes], int]:
        taken: list[bytes] = []
        rounds = 0
        async with reading(lambda body: taken.append(bytes(body))) as (reader, theirs):
            theirs.sendall(b"".join(framed(b"%d" % number) for number in range(count)))
            async with asyncio.timeout(10):
                while len(taken) < count:
                    rounds += 1
                    await asyncio.sleep(0)
                theirs.sendall(framed(b"last"))
                theirs.close()
                await reader.ended.wait()
        return taken, rounds

    with asyncio.Runner(loop_factory=new_loop) as runner:
        taken, rounds = runner.run(main())
    assert taken == [b"%d" % number for number in range(count)] + [b"last"]
    assert rounds >= count
