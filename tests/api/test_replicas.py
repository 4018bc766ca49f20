"""Two servers with a data folder each, one registry and one blob store: what one changes, the other serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from ..postgres_server import PostgresServer
from .server_process import Process

LONG = {"max_tokens": 230, "ignore_eos": True, "n": 8}


class Pair(NamedTuple):
    """Two servers, and where their adapters' files lie."""

    one: Process
    two: Process
    files: Path


@pytest.fixture(scope="module")
def pair(
    world: dict[str, Path], postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Started at the same moment on a database with nothing in it."""
    home, database = tmp_path_factory.mktemp("replicas"), postgres.new_database()
    servers = [
        Process(
            engine={"model": str(world["base"])},
            served_model_name="tiny",
            adapter_roots=[world["adapters"]],
            data_dir=home / f"data-{name}",
            database=database,
            blob_store=f"file://{home}/shared",
        )
        for name in ("one", "two")
    ]
    try:
        for server in servers:
            server.until_ready()
        yield Pair(*servers, home / "shared")
    finally:
        for server in servers:
            if server.popen.poll() is None:
                server.end()


def register(server: Process, name: str, source: str, **fields: object) -> httpx.Response:
    return server.client.post("/adapters", json={"name": name, "source": source, **fields})


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def has_file(pair: Pair, digest: str) -> bool:
    return bool(list(pair.files.rglob(f"{digest.removeprefix('sha256:')}.safetensors")))


def test_what_one_server_registers_the_other_serves_at_once(pair: Pair) -> None:
    """The very next request: nothing is polled for."""
    for here, there, name in (pair.one, pair.two, "a"), (pair.two, pair.one, "b"):
        receipt = register(here, name, "five").json()
        seen = there.client.get(f"/adapters/{name}").json()
        moving = ("residency", "status", "blocks")
        assert [seen[k] for k in seen if k not in moving] == [receipt[k] for k in receipt if k not in moving]
        assert texts(there.complete(adapter=name)) == texts(here.complete(adapter=name))
    base = texts(pair.one.complete())
    assert texts(pair.one.complete(adapter="b")) == texts(pair.two.complete(adapter="a")) != base


def test_what_one_server_replaces_rolls_back_or_removes_is_so_at_the_other(pair: Pair) -> None:
    one, two = pair.one, pair.two
    alone = {}
    for name in ("five", "sixteen"):
        register(one, name, name)
        alone[name] = texts(one.complete(adapter=name))
    assert alone["five"] != alone["sixteen"]
    register(one, "x", "five")
    assert two.complete(adapter="x").json()["adapter"] == "x@1"
    assert register(two, "x", "sixteen").json()["error"]["code"] == "adapter_exists"
    assert register(two, "x", "sixteen", replace=True).json()["version"] == 2
    for server in (one, two):
        answer = server.complete(adapter="x")
        assert (answer.json()["adapter"], texts(answer)) == ("x@2", alone["sixteen"])
        assert texts(server.complete(adapter="x@1")) == alone["five"]
    assert one.client.patch("/adapters/x", json={"version": 1}).json()["version"] == 1
    answer = two.complete(adapter="x")
    assert (answer.json()["adapter"], texts(answer)) == ("x@1", alone["five"])
    assert two.client.delete("/adapters/x@1").status_code == 204
    assert one.complete(adapter="x@1").json()["error"]["code"] == "model_not_found"
    assert texts(one.complete(adapter="x")) == alone["sixteen"]
    assert one.client.delete("/adapters/x").status_code == 204
    assert two.complete(adapter="x").json()["error"]["code"] == "model_not_found"
    assert two.client.delete("/adapters/x").json()["error"]["code"] == "adapter_not_found"


def test_a_request_ends_on_weights_that_another_server_removes_under_it(pair: Pair) -> None:
    one, two = pair.one, pair.two
    digest = register(one, "going", "one").json()["digest"]
    expected = texts(two.complete(adapter="going", **LONG))
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(two.complete(adapter="going", **LONG)))
    thread.start()
    two.wait_until(lambda: two.metric("running") + two.metric("waiting") > 0)
    assert one.client.delete("/adapters/going").status_code == 204
    kept = has_file(pair, digest)
    if two.metric("running") + two.metric("waiting") > 0:
        assert kept, "a request at the other server still needs the file"
    assert two.complete(adapter="going").json()["error"]["code"] == "model_not_found"
    thread.join(60)
    assert texts(answers[0]) == expected
    two.wait_until(lambda: not has_file(pair, digest), 10)  # whoever was last takes it away


def test_of_one_name_registered_at_both_servers_at_once_one_wins(pair: Pair) -> None:
    servers, sources = [pair.one, pair.two], ["five", "sixteen"] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: register(servers[i % 2], "raced", sources[i // 2]), range(8)))
    codes = [answer.status_code for answer in answers]
    assert codes.count(201) == 1
    assert set(codes) <= {200, 201, 409}
    (winner,) = [sources[i // 2] for i, code in enumerate(codes) if code == 201]
    register(pair.one, "winner", winner)
    expected = texts(pair.one.complete(adapter="winner"))
    for server in servers:
        answer = server.complete(adapter="raced")
        assert (answer.json()["adapter"], texts(answer)) == ("raced@1", expected)


def test_pins_and_removals_reach_every_servers_engine(serve, base, sources, tmp_path) -> None:
    settings = {
        "adapter_roots": (sources,),
        "database": f"sqlite:///{tmp_path}/registry.sqlite",
        "blob_store": f"file://{tmp_path}/shared",
    }
    with (
        serve(tmp_path / "one", base, **settings, data_dir=tmp_path / "1") as one,
        serve(tmp_path / "two", base, **settings, data_dir=tmp_path / "2") as two,
    ):
        first = one.register("a", "a", pinned=True).json()["digest"]
        second = one.register("b", "b").json()["digest"]
        two.wait_until(lambda: first in two.engine.adapters and two.engine.adapters[first].pinned)
        assert two.complete(adapter="b").status_code == 200
        one.register("a", "c", replace=True)
        two.wait_until(lambda: not two.engine.adapters[first].pinned)
        two.wait_until(lambda: sum(state.pinned for state in two.engine.adapters.values()) == 1)
        assert two.client.patch("/adapters/a", json={"version": 1, "pinned": True}).status_code == 200
        one.wait_until(lambda: one.engine.adapters[first].pinned)
        one.client.patch("/adapters/a", json={"pinned": False})
        two.wait_until(lambda: not any(state.pinned for state in two.engine.adapters.values()))
        one.client.delete("/adapters/b")
        two.wait_until(lambda: second not in two.engine.adapters)
        two.client.delete("/adapters/a")
        one.wait_until(lambda: not one.engine.adapters)
        two.wait_until(lambda: not two.engine.adapters)
        assert not list((tmp_path / "shared").rglob("*.safetensors"))


def test_a_pin_that_another_servers_pool_has_no_room_for_stops_nothing(
    serve, base, sources, tmp_path
) -> None:
    settings = {
        "adapter_roots": (sources,),
        "database": f"sqlite:///{tmp_path}/registry.sqlite",
        "blob_store": f"file://{tmp_path}/shared",
    }
    with (
        serve(tmp_path / "one", base, **settings, data_dir=tmp_path / "1") as one,
        serve(tmp_path / "two", base, **settings, data_dir=tmp_path / "2") as two,
    ):
        two.engine.pin_limit = 0
        digest = one.register("a", "a", pinned=True).json()["digest"]
        two.wait_until(lambda: digest in two.engine.adapters)
        assert two.complete(adapter="a").status_code == 200
        one.client.delete("/adapters/a")
        two.wait_until(lambda: digest not in two.engine.adapters)


def test_servers_that_share_a_data_folder_leave_each_others_uploads_alone(
    serve, base, sources, tmp_path
) -> None:
    with serve(tmp_path, base, adapter_roots=(sources,)) as one:
        upload = one.config.data_dir / "uploads" / "under-way"
        upload.mkdir()
        with serve(tmp_path, base, adapter_roots=(sources,)) as two:
            assert upload.exists()
            assert one.register("a", "a").status_code == 201
            assert two.complete(adapter="a").json()["adapter"] == "a@1"
    assert upload.exists(), "who found a living neighbour cleared nothing"
    with serve(tmp_path, base, adapter_roots=(sources,)):
        assert not upload.exists()


def test_a_registry_that_cannot_be_reached_ends_with_status_1(world, tmp_path, capfd) -> None:
    process = Process(
        engine={"model": str(world["base"])},
        data_dir=tmp_path / "data",
        database="postgresql://nobody@/none?host=/nowhere",
    )
    assert process.popen.wait(120) == 1
    assert "the database cannot be used" in capfd.readouterr().err
