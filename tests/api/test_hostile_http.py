"""Clients that send what is no HTTP, too much of it, or leave in between: nobody else notices, nothing is kept."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from heddle.api.http import exchange as exchanges
from heddle.api.http.exchange import Exchange
from heddle.api.http.protocol import MOST_HEAD, MOST_PIPELINED

from .raw_http import ENDS, LOOPS, answer_of, echo, head_of, in_pieces, run, serving


def alive() -> int:
    """Exchanges that memory holds; some are those of other tests' servers."""
    return sum(type(one) is Exchange for one in gc.get_objects())


@pytest.mark.parametrize("bad", [b"GARBAGE!!\r\n\r\n", b"x", b"}", b"BAD\r\n\r\n"])
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_bad_bytes_behind_a_request_come_after_its_answer(bad: bytes, pause: float) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.02)
        await echo(scope, receive, send)

    async def test() -> None:
        async with serving(slow) as connect:
            reader, writer = await connect()
            writer.write(b"POST /a " + ENDS + b"content-length: 2\r\n\r\nhi")
            if pause:
                await asyncio.sleep(pause / 5)
            writer.write(bad + (b"" if bad.endswith(b"\r\n") else b"\r\n\r\n"))
            assert await answer_of(reader) == b"POST /a hi"
            status, headers = await head_of(reader)
            assert status == 400
            await reader.readexactly(int(headers["content-length"]))
            assert await reader.read() == b""

    run(test())


def test_bad_bytes_behind_a_stream_are_not_answered_inside_it() -> None:
    async def test() -> None:
        async with serving(in_pieces) as connect:
            reader, writer = await connect()
            writer.write(b"GET /a " + ENDS + b"\r\nGARBAGE!!\r\n\r\n")
            status, headers = await head_of(reader)
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"
            assert (await head_of(reader))[0] == 400

    run(test())


def test_a_body_that_is_no_chunk_ends_its_request() -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"POST /a " + ENDS + b"transfer-encoding: chunked\r\n\r\nzz\r\n")
            assert (await head_of(reader))[0] == 400

    run(test())


def test_many_requests_at_once_wait_unread_and_all_are_answered() -> None:
    most, before = 0, alive()

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        nonlocal most
        if scope["path"].endswith("00"):
            most = max(most, alive() - before)
        await echo(scope, receive, send)

    async def test() -> None:
        async with serving(counting) as connect:
            reader, writer = await connect()
            count = 3000
            writer.write(b"".join(b"GET /%d %b\r\n" % (i, ENDS) for i in range(count)))
            for i in range(count):
                assert await answer_of(reader) == b"GET /%d " % i
        assert 0 < most < MOST_PIPELINED + 1000

    run(test())


def test_what_a_client_left_behind_is_gone_at_once() -> None:
    began = asyncio.Event()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        began.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def test() -> None:
        gc.collect()
        before = alive()
        gc.disable()
        try:
            async with serving(waiting) as connect:
                for _ in range(5):
                    began.clear()
                    _, writer = await connect()
                    writer.write((b"GET /a " + ENDS + b"\r\n") * 500)
                    await began.wait()
                    writer.transport.abort()
            assert alive() <= before + 1, "reference counting alone has freed them"
        finally:
            gc.enable()

    run(test())


def test_a_client_that_leaves_ends_the_request_that_runs_not_the_last_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends: list[str] = []

    async def until_gone(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        ends.append((await receive())["type"])

    async def test() -> None:
        async with serving(until_gone) as connect:
            _, writer = await connect()
            writer.write((b"GET /a " + ENDS + b"\r\n") * 3)
            await asyncio.sleep(0.05)
            writer.transport.abort()
        assert ends == ["http.disconnect"]

    run(test())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("where", ["url", "one header", "many headers"])
def test_the_head_of_a_request_is_bounded(where: str) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            long = b"a" * (MOST_HEAD + 20_000)
            head = {
                "url": b"GET /" + long,
                "one header": b"GET /a " + ENDS + b"x-long: " + long,
                "many headers": b"GET /a " + ENDS + b"x-a: b\r\n" * (len(long) // 8),
            }[where]
            writer.write(head)
            status, headers = await head_of(reader)
            assert status == 400
            assert str(MOST_HEAD).encode() in await reader.readexactly(int(headers["content-length"]))

            reader, writer = await connect()
            fits = b"x-long: " + long[: MOST_HEAD - 20_000] + b"\r\n"
            writer.write(b"GET /b " + ENDS + fits + b"\r\n")
            assert await answer_of(reader) == b"GET /b "

    run(test())


def head_of_size(size: int, where: str) -> bytes:
    """A request for /a whose head has `size` bytes, most of them in one place."""
    begin, end = b"POST /a", b" " + ENDS + b"content-length: 2\r\n\r\n"
    left = size - len(begin) - len(end)
    if where == "url":
        return begin + b"?" + b"a" * (left - 1) + end
    if where == "offer":
        end = end[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
        left = size - len(begin) - len(end)
    lines = b""
    if where == "many headers":
        lines = b"x-a: b\r\n" * (left // 8 - 2)
        left -= len(lines)
    return begin + end[:-2] + lines + b"x-long: " + b"a" * (left - 10) + b"\r\n\r\n"


@LOOPS
@pytest.mark.parametrize("where", ["url", "one header", "many headers", "offer"])
@pytest.mark.parametrize("piece", [1 << 20, 1000], ids=["one write", "small writes"])
@pytest.mark.parametrize("behind", [b"", b"POST /a " + ENDS + b"content-length: 5000\r\n\r\n" + b"b" * 5000])
def test_the_bound_of_a_head_is_the_same_however_it_comes(
    new_loop: Any, where: str, piece: int, behind: bytes
) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            for over in (0, 1):
                reader, writer = await connect()
                head = head_of_size(MOST_HEAD + over, where)
                assert len(head) == MOST_HEAD + over
                data = behind + head + b"hi"
                for begin in range(0, len(data), piece):
                    writer.write(data[begin : begin + piece])
                    await asyncio.sleep(0)
                if behind:
                    assert await answer_of(reader) == b"POST /a " + b"b" * 5000
                status, headers = await head_of(reader)
                body = await reader.readexactly(int(headers["content-length"]))
                if over:
                    assert (status, headers["connection"]) == (400, "close")
                    assert str(MOST_HEAD).encode() in body
                else:
                    assert (status, body) == (200, b"POST /a hi")

    run(test(), new_loop)


@pytest.mark.parametrize("piece", [1 << 20, 1000], ids=["one write", "small writes"])
def test_the_bound_of_a_trailer_is_the_same_however_it_comes(piece: int) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            for over in (0, 1):
                reader, writer = await connect()
                trailer = b"x-long: " + b"a" * (MOST_HEAD + over - len(b"x-long: \r\n")) + b"\r\n"
                data = b"POST /a %btransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n%b\r\n" % (ENDS, trailer)
                for begin in range(0, len(data), piece):
                    writer.write(data[begin : begin + piece])
                    await asyncio.sleep(0)
                status, headers = await head_of(reader)
                assert status == (400 if over else 200)
                assert ("connection" in headers) == bool(over)

    run(test())


@pytest.mark.parametrize(
    "version",
    [b" HTTP/0.9", b"", b" HTTP/1.2", b" HTTP/1.9", b" HTTP/2.0", b" HTTP/3.0", b" HTTP/9.9", b" HTTP/2"],
)
def test_other_versions_of_http_are_refused(version: bytes) -> None:
    asked: list[Any] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await echo(scope, receive, send)

    async def test() -> None:
        async with serving(noting) as connect:
            reader, writer = await connect()
            writer.write(b"GET /a %b\r\nGET /b%b\r\nhost: a\r\n\r\nGET /c %b\r\n" % (ENDS, version, ENDS))
            assert await answer_of(reader) == b"GET /a "
            status, headers = await head_of(reader)
            assert (status, headers["connection"]) == (400, "close")
            await reader.readexactly(int(headers["content-length"]))
            assert await reader.read() == b""
        assert asked == ["/a"]

    run(test())


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"deflate, chunked"])
def test_other_transfer_codings_are_refused_also_where_their_chunks_are_good(coding: bytes) -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"POST / %btransfer-encoding: %b\r\n\r\n2\r\nhi\r\n0\r\n\r\n" % (ENDS, coding))
            status, headers = await head_of(reader)
            assert (status, headers["connection"]) == (400, "close")
            assert b"coding" in await reader.readexactly(int(headers["content-length"]))

    run(test())


@pytest.mark.parametrize("pieces", [1, 2, 30])
def test_an_offer_of_another_protocol_is_ignored(pieces: int) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"

    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            data = b"POST /a " + ENDS + offer + b"content-length: 5\r\n\r\nhello"
            data += b"GET /b " + ENDS + offer + b"\r\n" + b"GET /c " + ENDS + b"\r\n"
            size = -(-len(data) // pieces)
            for begin in range(0, len(data), size):
                writer.write(data[begin : begin + size])
                await asyncio.sleep(0.002)
            for expected in (b"POST /a hello", b"GET /b ", b"GET /c "):
                assert await answer_of(reader) == expected

    run(test())


def test_a_tunnel_is_refused() -> None:
    async def test() -> None:
        async with serving(echo) as connect:
            reader, writer = await connect()
            writer.write(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await head_of(reader))[0] == 400

    run(test())


def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async def test() -> None:
        async with serving(in_pieces) as connect:
            reader, writer = await connect()
            writer.write(b"POST /a HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nx")
            status, headers = await head_of(reader)
            assert status == 200
            assert "transfer-encoding" not in headers
            assert await reader.read() == b"onethree"

    run(test())


def test_a_body_of_which_nothing_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "BODY_PAUSE", 0.05)
    ends: list[str] = []

    async def reading(scope: Any, receive: Any, send: Any) -> None:
        ends.append((await receive())["type"])
        ends.append((await receive())["type"])

    async def test() -> None:
        async with serving(reading) as connect:
            reader, writer = await connect()
            writer.write(b"POST /a " + ENDS + b"content-length: 5\r\n\r\nhel")
            assert await reader.read() == b""
        assert ends == ["http.request", "http.disconnect"]

    run(test())
