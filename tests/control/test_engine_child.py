"""What is said to an engine process in one round of the loop wakes it once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from heddle.core.engine.child import EngineChild
from heddle.core.engine.frame_reader import FrameReader
from heddle.core.messages import HEADER, Abort, decode_commands

from ..noted_transport import NotedTransport


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        yield process


def commands_in(data: bytes) -> list[Any]:
    found = []
    while data:
        end = HEADER.size + HEADER.unpack_from(data)[0]
        found += decode_commands(data[HEADER.size : end])
        data = data[end:]
    return found


async def test_commands_of_one_round_go_in_one_write_in_their_order(process):
    transport = NotedTransport()
    child = EngineChild(process, transport, FrameReader())
    child.send([Abort([1]), Abort([2])])
    child.send([Abort([3])])
    await asyncio.sleep(0)
    child.send([Abort([4])])
    await asyncio.sleep(0)
    first, second = transport.written
    assert commands_in(first) == [Abort([1]), Abort([2]), Abort([3])]
    assert commands_in(second) == [Abort([4])]


async def test_a_command_that_cannot_be_said_is_refused_and_holds_up_no_other(process):
    transport = NotedTransport()
    child = EngineChild(process, transport, FrameReader())
    child.send([Abort([1])])
    with pytest.raises(OverflowError):
        child.send([Abort([2**64])])
    await asyncio.sleep(0)
    assert commands_in(b"".join(transport.written)) == [Abort([1])]
