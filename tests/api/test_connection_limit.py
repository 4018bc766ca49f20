"""As many connections as there may be: idle ones make room, busy ones stay, and who finds no room is told so."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from heddle.api.config import ServerConfig
from heddle.api.http import open_connections, protocol
from heddle.core.config import EngineConfig

from .conftest import RunningServer, running
from .forked_server import ForkedServer, Forks
from .raw_http import ENDS, LOOPS, PAIR, answer_of, echo, head_of, run, serving

LIMIT = 4


async def ask(pair: PAIR, path: bytes = b"/a") -> bytes:
    reader, writer = pair
    writer.write(b"GET %b %b\r\n" % (path, ENDS))
    return await answer_of(reader)


async def ends(pair: PAIR) -> None:
    """The server closes it, with nothing said."""
    assert await pair[0].read() == b""


async def still_open(*pairs: PAIR) -> bool:
    """By now the server has closed none of them."""
    await asyncio.sleep(0.05)
    return not any(reader.at_eof() for reader, _ in pairs)


async def send_part_of_a_body(pair: PAIR) -> None:
    """Its call is refused while the rest is to come."""
    pair[1].write(b"POST /a %bcontent-length: 900000000000\r\n\r\nabc" % ENDS)
    assert (await head_of(pair[0]))[0] == 503


async def refused(pair: PAIR) -> None:
    reader, writer = pair
    writer.write(b"GET /a %b\r\n" % ENDS)
    status, headers = await head_of(reader)
    assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
    error = json.loads(await reader.readexactly(int(headers["content-length"])))["error"]
    assert error["code"] == "overloaded"
    assert await reader.read() == b""


class Gate:
    """An application whose /slow is answered when the gate is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            self.waiting += 1
            await self.open.wait()
        await echo(scope, receive, send)

    async def occupy(self, pair: PAIR) -> None:
        """A request that is under way from here on."""
        before = self.waiting
        pair[1].write(b"GET /slow %b\r\n" % ENDS)
        while self.waiting == before:  # noqa: ASYNC110 - it says nothing
            await asyncio.sleep(0.001)

    async def full_house(self, connect: Callable[[], Awaitable[PAIR]]) -> list[PAIR]:
        """As many connections as there may be, with a request under way on each."""
        pairs = [await connect() for _ in range(LIMIT)]
        for pair in pairs:
            await self.occupy(pair)
        return pairs


@LOOPS
def test_the_longest_idle_one_makes_room(new_loop: Any) -> None:
    async def test() -> None:
        async with serving(echo, LIMIT) as connect:
            pairs = [await connect() for _ in range(LIMIT)]
            for turn in (0, 1, 2, 3, 1):  # so 0, 2, 3, 1 is the order of their last answers
                await ask(pairs[turn])
            for number, victim in enumerate((0, 2, 3, 1)):
                pairs.append(await connect())
                await ask(pairs[-1])
                await ends(pairs[victim])
                rest = [pairs[turn] for turn in (0, 2, 3, 1)[number + 1 :]]
                assert await still_open(*rest), "one is enough"

    run(test(), new_loop)


@LOOPS
def test_busy_ones_stay_and_who_finds_no_room_is_told_so(
    monkeypatch: pytest.MonkeyPatch, new_loop: Any
) -> None:
    monkeypatch.setattr(open_connections, "HEAD_GRACE", -1)

    async def test() -> None:
        gate = Gate()
        async with serving(gate, LIMIT) as connect:
            busy = await gate.full_house(connect)
            for _ in range(3):
                await refused(await connect())
            gate.open.set()
            for reader, _ in busy:
                assert await answer_of(reader) == b"GET /slow "
            newcomer = await connect()
            assert await ask(newcomer) == b"GET /a "
            await ends(busy[0])
            assert await still_open(newcomer, *busy[1:])

    run(test(), new_loop)


@LOOPS
def test_one_that_sent_a_part_of_a_head_before_its_answer_is_not_idle(new_loop: Any) -> None:
    async def test() -> None:
        async with serving(echo, LIMIT) as connect:
            pairs = [await connect() for _ in range(LIMIT)]
            for reader, writer in pairs[:-1]:
                writer.write(b"GET /a %b\r\nGET /b HTT" % ENDS)
                assert await answer_of(reader) == b"GET /a "
            await ask(pairs[-1])
            assert await ask(await connect()) == b"GET /a "
            await ends(pairs[-1])
            for reader, writer in pairs[:-1]:
                writer.write(b"%b\r\n" % ENDS.removeprefix(b"HTT"))
                assert await answer_of(reader) == b"GET /b "

    run(test(), new_loop)


def test_one_that_came_without_room_is_served_where_there_is_some_by_its_request() -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(gate, LIMIT) as connect:
            busy = await gate.full_house(connect)
            newcomer = await connect()
            await asyncio.sleep(0.01)
            gate.open.set()
            for reader, _ in busy:
                await answer_of(reader)
            assert await ask(newcomer) == b"GET /a "
            await ends(busy[0])
            assert await still_open(newcomer, *busy[1:])
            gate.open.clear()
            for pair in (newcomer, *busy[1:]):
                await gate.occupy(pair)
            await refused(await connect())
            gate.open.set()
            assert await answer_of(newcomer[0]) == b"GET /slow ", "it is one of those that are served"

    run(test())


def test_one_that_leaves_makes_room() -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(gate, LIMIT) as connect:
            busy = await gate.full_house(connect)
            busy[0][1].transport.abort()
            await asyncio.sleep(0.05)
            assert await ask(await connect()) == b"GET /a "
            gate.open.set()

    run(test())


@pytest.mark.parametrize("sent", [b"", b"GET /a HT"], ids=["nothing", "a part of a head"])
def test_those_that_owe_a_head_for_long_make_room(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Else a client that opens connections and is silent would keep everybody out."""
    monkeypatch.setattr(open_connections, "HEAD_GRACE", 600)

    async def test() -> None:
        async with serving(echo, LIMIT) as connect:
            silent = [await connect() for _ in range(LIMIT)]
            for _, writer in silent:
                writer.write(sent)
            await refused(await connect())
            monkeypatch.setattr(open_connections, "HEAD_GRACE", -1)
            newcomer = await connect()
            assert await ask(newcomer) == b"GET /a "
            await ends(silent[0])
            assert await still_open(newcomer, *silent[1:])

    run(test())


def test_of_a_crowd_without_room_those_that_came_first_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_GRACE", 600)

    async def test() -> None:
        gate = Gate()
        async with serving(gate, LIMIT) as connect:
            for _ in range(LIMIT):
                await gate.occupy(await connect())
            crowd = [await connect() for _ in range(open_connections.MOST_SURPLUS + 20)]
            for reader, _ in crowd[:20]:
                status, headers = await head_of(reader)
                assert (status, headers["connection"]) == (503, "close")
                await reader.readexactly(int(headers["content-length"]))
                assert await reader.read() == b""
            for pair in crowd[20:]:
                await refused(pair)
            gate.open.set()

    run(test())


def test_a_surplus_one_that_brings_no_head_soon_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_GRACE", 0.1)

    async def test() -> None:
        gate = Gate()
        async with serving(gate, LIMIT) as connect:
            for _ in range(LIMIT):
                await gate.occupy(await connect())
            await ends(await connect())
            gate.open.set()

    run(test())


@LOOPS
def test_surplus_ones_that_still_send_stay_to_read_their_refusal_while_they_are_not_too_many(
    monkeypatch: pytest.MonkeyPatch, new_loop: Any
) -> None:
    monkeypatch.setattr(open_connections, "MOST_SURPLUS", 3)
    monkeypatch.setattr(protocol, "LINGER_BYTES", 1 << 60)
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 600)

    async def send(pair: PAIR, size: int) -> None:
        for _ in range(size >> 16):
            pair[1].write(bytes(1 << 16))
            await pair[1].drain()

    async def test() -> None:
        gate = Gate()
        async with serving(gate, LIMIT) as connect:
            for _ in range(LIMIT):
                await gate.occupy(await connect())
            crowd = [await connect() for _ in range(3)]
            for pair in crowd:
                await send_part_of_a_body(pair)
                await send(pair, 8 << 20)
            await refused(await connect())
            beyond = await connect()
            await send_part_of_a_body(beyond)
            with pytest.raises(ConnectionError):
                await send(beyond, 1 << 40)
            for pair in crowd:
                await send(pair, 8 << 20)
                assert b"overloaded" in await pair[0].read()
            gate.open.set()

    run(test(), new_loop)


# ------------------------------------------------------------------ a whole server


@pytest.fixture
def small(base: Path, sources: Path, tmp_path: Path) -> Iterator[RunningServer]:
    with running(tmp_path, base, adapter_roots=(sources,), limit_concurrency=LIMIT) as server:
        yield server


@contextmanager
def all_busy(server: RunningServer) -> Iterator[None]:
    """As many requests under way as there may be connections."""
    server.engine.hang_after = 1
    body = json.dumps({"prompt": "hi"}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(LIMIT):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(
                b"POST /v1/completions %bcontent-length: %d\r\n\r\n%b" % (ENDS, len(body), body)
            )
        server.wait_until(lambda: len(server.engine.running) == LIMIT)
        yield
        assert len(server.engine.running) == LIMIT, "none was cut"
        server.loop.call_soon_threadsafe(server.engine.released.set)
        server.wait_until(lambda: not server.engine.running)


def test_requests_are_refused_by_their_code_and_counted(small: RunningServer) -> None:
    with all_busy(small):
        answer = small.client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert "x-request-id" in answer.headers
    assert 'heddle_refused_requests_total{code="overloaded"} 1.0' in small.client.get("/metrics").text


@pytest.mark.parametrize("path", ["/health", "/ready", "/health/"])
def test_whether_it_is_alive_is_told_without_any_room(small: RunningServer, path: str) -> None:
    with all_busy(small):
        for _ in range(3):
            answer = small.client.get(path)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")


@pytest.mark.parametrize("crowd", [open_connections.MOST_SURPLUS, open_connections.MOST_SURPLUS + 20])
@pytest.mark.parametrize("sent", [b"POST /a %bcontent-length: 50000000\r\n\r\nabc" % ENDS, b"GET /a HT", b""])
def test_whether_it_is_alive_is_told_beside_a_crowd_without_room(
    small: RunningServer, crowd: int, sent: bytes
) -> None:
    """Whether it was refused and lingers over its bodies, or owes its heads."""
    host, port = small.url.removeprefix("http://").split(":")
    with all_busy(small), ExitStack() as stack:
        for _ in range(crowd):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            connection.sendall(sent)
            if sent.startswith(b"POST"):
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        for path in ("/health", "/ready", "/health", "/ready"):
            assert small.client.get(path).status_code == 200
        assert small.client.get("/v1/models").json()["error"]["code"] == "overloaded"


# ------------------------------------------------------------------ the files that a process may have open


def test_a_crowd_cannot_take_the_files_that_the_server_needs(base: Path, tmp_path: Path) -> None:
    forks = Forks()
    resource.prlimit(forks.pid, resource.RLIMIT_NOFILE, (320, 320))
    server = ForkedServer(forks, engine={"model": str(base)}, data_dir=tmp_path, served_model_name="tiny")
    try:
        server.until_ready()
        host, port = server.url.removeprefix("http://").split(":")
        with ExitStack() as stack:
            for _ in range(500):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(3):
                with httpx.Client(base_url=server.url, timeout=20) as client:
                    assert client.get("/health").status_code == 200
        assert server.complete().status_code == 200
    finally:
        server.kill()
        forks.close()


@pytest.mark.parametrize(
    ("files", "connections"), [(1024, 768), (65536, 65280), (320, 80), (resource.RLIM_INFINITY, 2**20 - 256)]
)
def test_the_limit_is_what_the_systems_own_leaves(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (files, files))
    config = ServerConfig(engine=EngineConfig(model="m"))
    assert (config.most_connections, config.problem()) == (connections, None)
    fits = msgspec.structs.replace(config, limit_concurrency=connections)
    assert (fits.most_connections, fits.problem()) == (connections, None)
    problem = msgspec.structs.replace(config, limit_concurrency=connections + 1).problem()
    assert problem is not None
    assert f"--limit-concurrency {connections + 1}" in problem
    assert str(connections) in problem
