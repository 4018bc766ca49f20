"""HTTP as clients of every kind speak it: what goes over the wire for a small application behind our connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from heddle.api.http.exchange import exchange_of
from heddle.api.http.open_connections import OpenConnections
from heddle.api.http.protocol import HttpProtocol

from ..noted_transport import NotedTransport
from .raw_http import ENDS, LOOPS, answer_of, echo, head_of, in_pieces, run, serving


@LOOPS
def test_many_requests_come_over_one_connection(new_loop):
    async def main() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            for number in range(3):
                writer.write(b"POST /%d %bcontent-length: 3\r\n\r\nabc" % (number, ENDS))
                assert await answer_of(reader) == b"POST /%d abc" % number

    run(main(), new_loop)


async def test_those_that_come_before_an_answer_is_sent_are_answered_in_their_order():
    running = 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.01)
        await echo(scope, receive, send)
        running -= 1

    async with serving(slow) as connect:
        reader, writer = await connect()
        writer.write(b"".join(b"POST /%d %bcontent-length: 1\r\n\r\nx" % (n, ENDS) for n in range(5)))
        assert [await answer_of(reader) for _ in range(5)] == [b"POST /%d x" % n for n in range(5)]


@pytest.mark.parametrize("asked", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"])
async def test_who_wants_the_connection_closed_gets_it_closed(asked):
    async with serving(echo) as connect:
        reader, writer = await connect()
        writer.write(b"GET / %b\r\n" % asked)
        _, headers = await head_of(reader)
        assert headers["connection"] == "close"
        assert await reader.read() == b"GET / "


async def test_a_head_is_the_head_alone():
    async with serving(echo) as connect:
        reader, writer = await connect()
        writer.write(b"HEAD /a %b\r\nGET /b %b\r\n" % (ENDS, ENDS))
        assert (await head_of(reader))[1]["content-length"] == "8"
        assert await answer_of(reader) == b"GET /b "


async def test_a_body_is_asked_for_where_the_client_waits_to_be_asked():
    async with serving(echo) as connect:
        reader, writer = await connect()
        writer.write(b"POST / %bcontent-length: 2\r\nexpect: 100-continue\r\n\r\n" % ENDS)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ab")
        assert await answer_of(reader) == b"POST / ab"


async def test_bodies_without_a_length_go_in_chunks_both_ways():
    async with serving(echo) as connect:
        reader, writer = await connect()
        writer.write(b"POST / %btransfer-encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n" % ENDS)
        assert await answer_of(reader) == b"POST / abcde"
    async with serving(in_pieces) as connect:
        reader, writer = await connect()
        writer.write(b"GET / %b\r\n" % ENDS)
        assert (await head_of(reader))[1]["transfer-encoding"] == "chunked"
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"


async def test_a_large_body_comes_in_pieces_as_it_is_taken():
    seen: list[int] = []

    async def count(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            await asyncio.sleep(0.001)
            message = await receive()
            seen.append(len(message["body"]))
            more = message["more_body"]
        exchange_of(scope).answer_json(200, b"%d" % sum(seen))

    size = 4 << 20
    async with serving(count) as connect:
        reader, writer = await connect()
        writer.write(b"POST / %bcontent-length: %d\r\n\r\n" % (ENDS, size) + bytes(size))
        assert await answer_of(reader) == b"%d" % size
    assert max(seen) <= 1 << 20


async def test_who_does_not_read_is_not_sent_without_end():
    sent = 0

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        exchange = exchange_of(scope)
        exchange.begin(200, [])
        while not exchange.disconnected:
            await exchange.writable()
            exchange.write(bytes(1 << 16))
            sent += 1 << 16

    async with serving(endless) as connect:
        reader, writer = await connect()
        writer.write(b"GET / %b\r\n" % ENDS)
        await head_of(reader)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 32 << 20
        writer.transport.abort()


async def test_what_an_application_cannot_answer_is_a_500_that_ends_the_connection(caplog):
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("planted")

    async with serving(fails) as connect:
        reader, writer = await connect()
        writer.write(b"GET / %b\r\n" % ENDS)
        status, headers = await head_of(reader)
        assert (status, headers["connection"]) == (500, "close")
        assert b'"internal_error"' in await reader.read()
    assert "planted" in caplog.text


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(caplog):
    async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        exchange.begin(200, [(b"content-length", b"10")])
        exchange.write(b"abc")

    async with serving(breaks_off) as connect:
        reader, writer = await connect()
        writer.write(b"GET / %b\r\n" % ENDS)
        await head_of(reader)
        assert await reader.read() == b"abc"
    assert "not finished" in caplog.text


async def test_a_header_cannot_break_the_line(caplog):
    async def splits(scope: Any, receive: Any, send: Any) -> None:
        exchange_of(scope).answer_json(200, b"{}", [(b"x-a", b"1\r\nx-b: 2")])

    async with serving(splits) as connect:
        reader, writer = await connect()
        writer.write(b"GET / %b\r\n" % ENDS)
        assert b"x-b" not in await reader.read()
    assert "line break" in caplog.text


async def test_all_of_a_round_of_the_loop_goes_in_one_write():
    config = uvicorn.Config(in_pieces, lifespan="off", ws="none", log_config=None, access_log=False)
    config.load()
    connection, transport = HttpProtocol(config, OpenConnections(1), {}), NotedTransport()
    connection.connection_made(transport)
    connection.data_received(b"GET / %b\r\n" % ENDS)
    for _ in range(3):
        await asyncio.sleep(0)
    (data,) = transport.written
    assert data.startswith(b"HTTP/1.1 200 OK\r\n")
    assert data.endswith(b"\r\n\r\n3\r\none\r\n5\r\nthree\r\n0\r\n\r\n")
    connection.connection_lost(ValueError("the end of the test"))
