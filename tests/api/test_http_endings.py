"""How connections end: with bodies that nobody reads, with who asked for it, and with the server's own end."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from heddle.api.errors import ApiError
from heddle.api.http import protocol
from heddle.api.http.exchange import exchange_of

from .conftest import RunningServer
from .raw_http import ENDS, LOOPS, answer_of, echo, head_of, run, serving


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Without a look at the body."""
    exchange_of(scope).answer_json(413, b'"too large"')


# ------------------------------------------------------------------ bodies that nobody reads


def test_a_client_that_waits_to_be_asked_is_told_that_the_connection_ends() -> None:
    async def test() -> None:
        async with serving(refuse) as connect:
            reader, writer = await connect()
            writer.write(b"POST /a %bexpect: 100-continue\r\ncontent-length: 900000000\r\n\r\n" % ENDS)
            status, headers = await head_of(reader)
            assert (status, headers["connection"]) == (413, "close")
            assert await reader.read() == b'"too large"', "and then its end, without waiting for the client"

    run(test())


@LOOPS
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_client_that_is_still_sending_gets_its_answer(new_loop: Any, framing: str) -> None:
    """It writes all of it before it reads, as most clients do; nothing is reset."""
    size = 24 << 20

    async def test() -> None:
        async with serving(refuse) as connect:
            reader, writer = await connect()
            body, head = bytes(size), b"content-length: %d" % size
            if framing == "chunks":
                body, head = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body), b"transfer-encoding: chunked"
            writer.write(b"POST /a %b%b\r\n\r\n" % (ENDS, head))
            for begin in range(0, len(body), 1 << 20):
                writer.write(body[begin : begin + (1 << 20)])
                await writer.drain()  # a reset would raise here
            status, headers = await head_of(reader)
            assert (status, headers["connection"]) == (413, "close")
            assert await reader.read() == b'"too large"'

    run(test(), new_loop)


@pytest.mark.parametrize("bound", ["LINGER_BYTES", "LINGER_SECONDS"])
def test_what_is_let_go_is_bounded(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(protocol, "LINGER_BYTES", 1 << 20 if bound == "LINGER_BYTES" else 1 << 60)
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.2 if bound == "LINGER_SECONDS" else 600)

    async def test() -> None:
        async with serving(refuse) as connect:
            began, sent = time.monotonic(), 0
            reader, writer = await connect()
            writer.write(b"POST /a %bcontent-length: 900000000000\r\n\r\n" % ENDS)
            await head_of(reader)
            with suppress(ConnectionError):
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
                    sent += 1 << 16
                    if bound == "LINGER_SECONDS":
                        await asyncio.sleep(0.01)
            if bound == "LINGER_BYTES":
                assert sent < 32 << 20, "what the system's buffers hold comes on top"
            else:
                assert time.monotonic() - began > 0.1

    run(test())


def test_bad_bytes_in_a_long_head_leave_the_answer_readable() -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"GET /a " + ENDS + b"x-long: ")
            for _ in range(40):
                writer.write(b"a" * (1 << 18))
                await writer.drain()
            assert (await head_of(reader))[0] == 400
            await reader.read()

    run(test())


def test_a_body_that_was_there_leaves_the_connection_open() -> None:
    async def test() -> None:
        async with serving(refuse) as connect:
            reader, writer = await connect()
            for _ in range(2):
                writer.write(b"POST /a %bcontent-length: 5\r\n\r\nhello" % ENDS)
                status, headers = await head_of(reader)
                assert (status, "connection" in headers) == (413, False)
                await reader.readexactly(int(headers["content-length"]))

    run(test())


def test_nothing_behind_a_refused_body_becomes_a_request() -> None:
    seen: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await refuse(scope, receive, send)

    async def test() -> None:
        async with serving(noting) as connect:
            reader, writer = await connect()
            writer.write(b"POST /a %bcontent-length: 20\r\n\r\n" % ENDS)
            await head_of(reader)
            writer.write(bytes(20) + b"GET /b %b\r\n" % ENDS)
            assert await reader.read() == b'"too large"'
        assert seen == ["/a"]

    run(test())


def test_who_asked_for_the_end_gets_no_more_answers() -> None:
    """However many requests are behind it (RFC 9112, 9.6)."""
    seen: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await echo(scope, receive, send)

    async def test() -> None:
        async with serving(noting) as connect:
            reader, writer = await connect()
            writer.write(b"GET /a %bconnection: close\r\n\r\n" % ENDS + b"GET /b %b\r\n" % ENDS * 500)
            assert await answer_of(reader) == b"GET /a "
            assert await reader.read() == b""
        assert seen == ["/a"]

    run(test())


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (b"connection: close\r\ncontent-length: 2\r\n\r\nhi", b""),
        (b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nconnection: close\r\n\r\n", b""),
        (b"connection: Upgrade, close\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n", b"hi"),
        (b"upgrade: h2c\r\nconnection: upgrade\r\nconnection: close\r\ncontent-length: 2\r\n\r\n", b"hi"),
    ],
)
def test_the_end_is_asked_for_in_a_head_a_trailer_or_beside_an_offer(head: bytes, tail: bytes) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"POST /a %b%b%b" % (ENDS, head, tail) + b"GET /b %b\r\n" % ENDS)
            status, headers = await head_of(reader)
            assert (status, headers["connection"]) == (200, "close")
            assert await reader.read() == b"POST /a hi"

    run(test())


def test_a_call_whose_body_is_not_whole_does_not_hold_up_the_servers_end() -> None:
    """Others are answered."""
    connections: list[protocol.HttpProtocol] = []
    both, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        connections.append(exchange_of(scope)._connection)
        if len(connections) == 2:
            both.set()
        try:
            body = b""
            while len(body) < 2:
                body += (await receive())["body"]
            await goes_on.wait()
            exchange_of(scope).answer_json(200, body)
        except ApiError as error:
            exchange_of(scope).answer_json(error.status, error.code.encode())

    async def test() -> None:
        async with serving(slow) as connect:
            (whole, whole_writer), (part, part_writer) = await connect(), await connect()
            for writer, body in ((whole_writer, b"hi"), (part_writer, b"h")):
                writer.write(b"POST /a %bcontent-length: 2\r\n\r\n%b" % (ENDS, body))
            await both.wait()
            for connection in connections:
                connection.drain()
            assert (await head_of(part))[0] == 503
            assert await part.read() == b"shutting_down"
            goes_on.set()
            assert (await head_of(whole))[0] == 200

    run(test())


def test_what_the_server_does_not_wait_for_any_longer_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    tasks: asyncio.Queue[Any] = asyncio.Queue()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        tasks.put_nowait(asyncio.current_task())
        await asyncio.Event().wait()

    async def test() -> None:
        async with serving(endless) as connect:
            reader, writer = await connect()
            writer.write(b"GET /a %b\r\n" % ENDS)
            (await tasks.get()).cancel()
            status, headers = await head_of(reader)
            assert (status, headers["connection"]) == (503, "close")
            assert b"shutting_down" in await reader.read()

    run(test())
    assert not caplog.records


@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        ("/v1/completions", b"", 413),
        ("/adapters", b"content-type: multipart/form-data; boundary=zz\r\n", 413),
        ("/nowhere", b"", 404),
        ("/v1/models", b"", 405),
        ("/v1/chat/completions", b"authorization: Bearer a\r\nauthorization: Bearer b\r\n", 401),
    ],
)
def test_whatever_refuses_a_body_ends_the_connection(
    server: RunningServer, path: str, more: bytes, status: int, expects: bytes
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000000\r\n".encode()
        connection.sendall(head + more + expects + b"\r\n")
        if not expects:
            connection.sendall(bytes(4 << 20))
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    lines = answer.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    assert lines[0].startswith(b"http/1.1 %d " % status)
    assert b"connection: close" in lines
