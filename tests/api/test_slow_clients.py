"""Clients that say nothing, take nothing, or send in very small pieces: each is bounded, and ends alone."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest
from heddle.api.http import exchange, protocol
from heddle.api.http.exchange import exchange_of

from .raw_http import ENDS, LOOPS, answer_of, echo, head_of, run, serving

# ------------------------------------------------------------------ clients that say nothing


@LOOPS
@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /a HT", b"GET /a HTTP/1.1\r\nhost: a\r\nx-a"])
@pytest.mark.parametrize("behind", [False, True], ids=["at first", "behind an answer"])
def test_a_head_that_does_not_come_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, new_loop: Any, sent: bytes, behind: bool
) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            if not behind:
                monkeypatch.setattr(protocol, "HEAD_PAUSE", 0.2)
            began = time.monotonic()
            reader, writer = await connect()
            if behind:
                writer.write(b"GET /b %b\r\n" % ENDS)
                assert await answer_of(reader) == b"GET /b "
                monkeypatch.setattr(protocol, "HEAD_PAUSE", 0.2)
                await asyncio.sleep(0.3)
                assert not reader.at_eof(), "between requests it may be silent for longer"
                began = time.monotonic()
            writer.write(sent)
            if behind and not sent:
                return
            assert await reader.read() == b""
            assert time.monotonic() - began > 0.1

    run(test(), new_loop)


@LOOPS
@pytest.mark.parametrize("sent", [b"G", b"GET /a HT", b"GET /a HTTP/1.1\r\nhost: a\r\nx-a"])
def test_a_part_of_a_head_that_came_before_the_answer_is_no_rest(
    monkeypatch: pytest.MonkeyPatch, new_loop: Any, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_PAUSE", 600)

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        monkeypatch.setattr(protocol, "HEAD_PAUSE", 0.2)
        await echo(scope, receive, send)

    async def test() -> None:
        async with serving(answering) as connect:
            reader, writer = await connect()
            writer.write(b"GET /b %b\r\n%b" % (ENDS, sent))
            assert await answer_of(reader) == b"GET /b "
            assert await reader.read() == b""

    run(test(), new_loop)


def test_a_head_that_comes_byte_by_byte_has_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"GET /b %b\r\n" % ENDS)
            assert await answer_of(reader) == b"GET /b "
            monkeypatch.setattr(protocol, "HEAD_PAUSE", 0.2)
            end, began = asyncio.create_task(reader.read()), time.monotonic()
            writer.write(b"GET /")
            while not end.done():
                writer.write(b"a")
                await asyncio.sleep(0.02)
            assert time.monotonic() - began > 0.1

    run(test())


def test_a_call_that_takes_long_is_not_taken_for_a_head_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            under_way.set()
            await asyncio.sleep(0.2)
            monkeypatch.setattr(protocol, "HEAD_PAUSE", 600)
        await echo(scope, receive, send)

    async def test() -> None:
        async with serving(slow) as connect:
            reader, writer = await connect()
            writer.write(b"GET /a %b\r\n" % ENDS)
            assert await answer_of(reader) == b"GET /a "
            monkeypatch.setattr(protocol, "HEAD_PAUSE", 0.05)
            writer.write(b"GET /slow %b\r\nGE" % ENDS)
            await under_way.wait()
            writer.write(b"T /b")
            assert await answer_of(reader) == b"GET /slow "
            writer.write(b" %b\r\n" % ENDS)
            assert await answer_of(reader) == b"GET /b "

    run(test())


# ------------------------------------------------------------------ clients that take nothing


@LOOPS
@pytest.mark.parametrize("how", ["stream", "at once", "at once and to its end"])
def test_a_client_that_takes_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, new_loop: Any, how: str
) -> None:
    monkeypatch.setattr(protocol, "SEND_PAUSE", 0.2)
    gone: list[bool] = []

    async def much(scope: Any, receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        if how == "stream":
            exchange.begin(200, [])
            while not exchange.disconnected:
                await exchange.writable()
                exchange.write(bytes(1 << 16))
            gone.append(True)
        else:
            exchange.answer_json(200, bytes(32 << 20))

    async def test() -> None:
        async with serving(much) as connect:
            reader, writer = await connect()
            writer.transport.pause_reading()
            end = b"connection: close\r\n" if how.endswith("end") else b""
            writer.write(b"GET / %b%b\r\n" % (ENDS, end))
            await asyncio.sleep(1)
            writer.transport.resume_reading()
            taken = 0
            while data := await reader.read(1 << 20):
                taken += len(data)
            assert taken < 32 << 20, "what the system's buffers held"
        assert gone == ([True] if how == "stream" else [])

    run(test(), new_loop)


def test_a_client_that_takes_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SEND_PAUSE", 0.2)
    size = 24 << 20

    async def much(scope: Any, receive: Any, send: Any) -> None:
        exchange_of(scope).answer_json(200, bytes(size))

    async def test() -> None:
        async with serving(much) as connect:
            reader, writer = await connect()
            writer.write(b"GET / %bconnection: close\r\n\r\n" % ENDS)
            await head_of(reader)
            taken = 0
            while data := await reader.read(1 << 20):
                taken += len(data)
                await asyncio.sleep(0.02)
            assert taken == size

    run(test())


# ------------------------------------------------------------------ bodies that come slowly


@LOOPS
@pytest.mark.parametrize("framing", ["content-length: 100000", "transfer-encoding: chunked"])
def test_a_body_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch, new_loop: Any, framing: str) -> None:
    monkeypatch.setattr(exchange, "BODY_PAUSE", 0.4)

    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"POST / %b%b\r\n\r\n" % (ENDS, framing.encode()))
            end, began = asyncio.create_task(reader.read()), time.monotonic()
            while not end.done():
                writer.write(b"1\r\na\r\n" if "chunked" in framing else b"a")
                await asyncio.sleep(0.02)
            with suppress(ConnectionResetError):  # a piece may still have been on its way
                assert end.result() == b""
            assert time.monotonic() - began > 0.3

    run(test(), new_loop)


def test_a_body_that_comes_slowly_but_steadily_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_PAUSE", 0.4)
    pieces = 30

    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"POST / %bcontent-length: %d\r\n\r\n" % (ENDS, 1000 * pieces))
            for _ in range(pieces):
                writer.write(b"a" * 1000)
                await asyncio.sleep(0.05)
            assert await answer_of(reader) == b"POST / " + b"a" * 1000 * pieces

    run(test())


def test_the_time_in_which_nobody_reads_a_body_is_not_its_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_PAUSE", 0.4)

    async def later(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(3):
            await receive()
            await asyncio.sleep(0.3)
        await echo(scope, receive, send)

    async def test() -> None:
        async with serving(later) as connect:
            reader, writer = await connect()
            writer.write(b"POST / %bcontent-length: 5\r\n\r\n" % ENDS)
            for _ in range(4):
                writer.write(b"a")
                await asyncio.sleep(0.3)
            writer.write(b"a")
            assert (await answer_of(reader)).startswith(b"POST / ")

    run(test())


# ------------------------------------------------------------------ bodies in very small pieces


def test_a_body_of_one_byte_chunks_costs_what_its_bytes_do() -> None:
    """Not their square: 60 000 of them would copy 1.8 GB."""
    count = 60_000

    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"POST / %btransfer-encoding: chunked\r\n\r\n" % ENDS)
            began = time.process_time()
            writer.write(b"1\r\na\r\n" * count + b"0\r\n\r\n")
            assert await answer_of(reader) == b"POST / " + b"a" * count
            assert time.process_time() - began < 1

    run(test())


@pytest.mark.parametrize(
    "endless", [b"1;" + b"a" * 200_000, b"0\r\n" + b"x-a: b\r\n" * 30_000, b"0\r\nx" + b"x" * 200_000]
)
def test_what_is_between_a_bodys_pieces_is_bounded(endless: bytes) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"POST / %btransfer-encoding: chunked\r\n\r\n2\r\nab\r\n" % ENDS + endless)
            status, headers = await head_of(reader)
            assert status == 400
            assert str(protocol.MOST_HEAD).encode() in await reader.readexactly(
                int(headers["content-length"])
            )

    run(test())
