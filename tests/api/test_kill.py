"""kill -9 while adapters are registered, replaced and removed: nothing acknowledged is lost, and nothing is half
there.

`HEDDLE_KILLS=50` kills the whole server, engine and all, that often.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from heddle.lora.canonical import open_adapter

from .forked_server import ForkedServer, Forks
from .peft_reference import reference, text_of
from .server_process import PROMPT, Process

Server = Process | ForkedServer

KILLS = int(os.environ.get("HEDDLE_KILLS", "2"))
SEED = int(os.environ.get("HEDDLE_SEED", "20260504"))


@dataclass(frozen=True)
class State:
    """What a name is."""

    versions: tuple[tuple[int, str], ...] = ()
    """Number and source of each."""
    current: int | None = None

    def without(self, number: int | None) -> State:
        """After the removal of one version, or (None) of all."""
        left = tuple(version for version in self.versions if number is not None and version[0] != number)
        if not left:
            return State()
        kept = self.current in dict(left)
        return State(left, self.current if kept else max(dict(left)))


@dataclass
class Name:
    """One name as its only writer knows it: `possible` has two states while an answer is outstanding."""

    name: str
    possible: list[State] = field(default_factory=lambda: [State()])
    meaning: dict[int, str] = field(default_factory=dict)
    """The source of every version there ever was."""
    answered: int = 0

    @property
    def state(self) -> State:
        (state,) = self.possible
        return state

    def act(self, client: httpx.Client, folders: dict[str, Path], chance: random.Random) -> None:
        """One change, and what it may have come to; an httpx.TransportError leaves that open."""
        now = self.state
        numbers = [number for number, _ in now.versions]
        action = chance.choice(["write", "write", "write", "remove", "remove one", "roll back"])
        if action == "write" or not numbers:
            source = chance.choice([s for s in folders if s != dict(now.versions).get(now.current or 0)])
            number = max([*self.meaning, 0]) + 1
            after = State((*now.versions, (number, source)), number)
            answer = self._try(after, lambda: _write(client, self.name, folders[source], chance))
            assert answer.status_code == 201, answer.text
            assert answer.json()["version"] == number
            self.meaning[number] = source
        elif action == "remove":
            answer = self._try(State(), lambda: client.delete(f"/adapters/{self.name}"))
            assert answer.status_code == 204, answer.text
        elif action == "remove one":
            number = chance.choice(numbers)
            after = now.without(number)
            answer = self._try(after, lambda: client.delete(f"/adapters/{self.name}@{number}"))
            assert answer.status_code == 204, answer.text
        else:
            number = chance.choice(numbers)
            body = {"version": number}
            after = State(now.versions, number)
            answer = self._try(after, lambda: client.patch(f"/adapters/{self.name}", json=body))
            assert answer.status_code == 200, answer.text
        self.possible = self.possible[1:]
        self.answered += 1

    def _try(self, after: State, call: Callable[[], httpx.Response]) -> httpx.Response:
        self.possible.append(after)
        return call()


def _write(client: httpx.Client, name: str, folder: Path, chance: random.Random) -> httpx.Response:
    """Register or replace, from the server's own disk or by an upload."""
    if chance.random() < 0.5:
        body = {"name": name, "source": folder.name, "replace": True}
        return client.post("/adapters", json=body)
    files = [
        ("files", (file, (folder / file).read_bytes()))
        for file in ("adapter_config.json", "adapter_model.safetensors")
    ]
    return client.post("/adapters", data={"name": name, "replace": "true"}, files=files)


def hammer(
    server: Server, names: list[Name], folders: dict[str, Path], seed: float, failures: list[BaseException]
) -> None:
    """Change these names until the server is gone."""
    chance = random.Random(seed)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while True:
                chance.choice(names).act(client, folders, chance)
    except httpx.TransportError:
        pass
    except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
        failures.append(error)


def use(
    server: Server,
    names: list[str],
    seed: float,
    heard: list[tuple[str, str]],
    failures: list[BaseException],
) -> None:
    """Ask for answers until the server is gone, and note on which version each was given."""
    chance = random.Random(seed)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while True:
                body = {"model": chance.choice(names), "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
                answer = client.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    heard.append((answer.json()["adapter"], answer.json()["choices"][0]["text"]))
                else:
                    assert answer.json()["error"]["code"] == "model_not_found", answer.text
    except httpx.TransportError:
        pass
    except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
        failures.append(error)


def found(server: Server, name: str, sources: dict[str, str]) -> State:
    answer = server.client.get(f"/adapters/{name}/versions")
    if answer.status_code == 404:
        return State()
    versions = answer.json()["data"]
    assert all(version["status"] != "failed" for version in versions)
    current = server.client.get(f"/adapters/{name}").json()["version"]
    return State(tuple((v["version"], sources[v["digest"]]) for v in versions), current)


class Play:
    """Kills, starts and checks one server again and again."""

    def __init__(self, start: Callable[[], Server], folders: dict[str, Path], data: Path, seed: int) -> None:
        self.start = start
        self.folders = folders
        self.data = data
        self.chance = random.Random(seed)
        self.names = [Name(f"name-{number}") for number in range(6)]
        self.cut_off = 0
        """Changes whose answer never came."""

    def run(self, kills: int, right: Callable[[str, str], str]) -> None:
        """`right`: (source, digest) -> the text of every answer on it."""
        server = self.start()
        try:
            server.until_ready()
            sources = {}
            for name in self.folders:
                plan = server.client.post("/adapters?dry_run=true", json={"name": "x", "source": name})
                sources[plan.json()["digest"]] = name
            texts = {name: right(name, digest) for digest, name in sources.items()}
            for kill in range(kills):
                heard = self._kill(server)
                server = self.start()
                server.until_ready()
                self._check(server, sources, texts, f"kill {kill}")
                print(f"kill {kill + 1}: all is whole", flush=True)
                meanings = {
                    f"{name.name}@{n}": source for name in self.names for n, source in name.meaning.items()
                }
                for adapter, text in heard:
                    if adapter in meanings:  # else its registration was neither acknowledged, nor did it last
                        assert text == texts[meanings[adapter]]
        finally:
            server.kill()
        answered = sum(name.answered for name in self.names)
        print(f"{kills} kills, {answered} changes acknowledged, {self.cut_off} cut off")
        assert answered
        assert self.cut_off

    def _kill(self, server: Server) -> list[tuple[str, str]]:
        """At a random moment of a crowd of changes; returns the answers there were: (adapter, text)."""
        failures: list[BaseException] = []
        heard: list[tuple[str, str]] = []
        threads = [
            threading.Thread(target=hammer, args=(server, part, self.folders, self.chance.random(), failures))
            for part in (self.names[:2], self.names[2:4], self.names[4:])
        ]
        called = [name.name for name in self.names]
        threads.append(
            threading.Thread(target=use, args=(server, called, self.chance.random(), heard, failures))
        )
        for thread in threads:
            thread.start()
        enough = sum(name.answered for name in self.names) + self.chance.randrange(12)
        patience = time.monotonic() + 20
        while sum(name.answered for name in self.names) < enough and time.monotonic() < patience:
            time.sleep(0.002)
        time.sleep(self.chance.uniform(0, 0.1))
        server.kill()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self.cut_off += sum(len(name.possible) == 2 for name in self.names)
        return heard

    def _check(self, server: Server, sources: dict[str, str], texts: dict[str, str], when: str) -> None:
        for name in self.names:
            state = found(server, name.name, sources)
            assert state in name.possible, f"{when}: {name.name} is {state}, not of {name.possible}"
            name.possible = [state]
            name.meaning.update(state.versions)
            for number, source in state.versions:
                answer = server.complete(adapter=f"{name.name}@{number}")
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"] == texts[source]
        check_files(self.data, {v for name in self.names for _, v in name.state.versions}, sources)


@pytest.mark.timeout(3600)
def test_fifty_kills_of_the_serving_process_lose_nothing_and_leave_nothing_half_done(
    base: Path, sources: Path, tmp_path: Path
) -> None:
    """Registry, files and HTTP are all in this process; a stub stands for the engine, which only reads."""
    forks = Forks()
    settings = {
        "engine": {"model": str(base)},
        "served_model_name": "tiny",
        "adapter_roots": [sources],
        "data_dir": tmp_path / "data",
    }
    folders = {name: sources / name for name in "abc"}
    play = Play(lambda: ForkedServer(forks, **settings), folders, tmp_path / "data", SEED)
    try:
        play.run(50, lambda source, digest: f"{digest.removeprefix('sha256:')[0]}hello")
    finally:
        forks.close()


@pytest.mark.timeout(7200)
def test_kills_of_the_whole_server_lose_nothing_and_every_answer_is_right_afterwards(
    world: dict[str, Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "served_model_name": "tiny",
        "adapter_roots": [world["adapters"]],
        "data_dir": tmp_path / "data",
    }
    folders = {name: world["adapters"] / name for name in ("one", "five", "sixteen")}

    def start() -> Process:
        return Process(engine={"model": str(world["base"])}, **settings)

    def right(source: str, digest: str) -> str:
        return text_of(reference(world, source, [*PROMPT.encode()], 12)[0])

    Play(start, folders, tmp_path / "data", SEED).run(KILLS, right)


def check_files(data: Path, live: set[str], sources: dict[str, str]) -> None:
    """The stored files are just those of live versions, and whole; no upload is left."""
    digests = set()
    for file in (path for path in (data / "blobs").rglob("*") if path.is_file()):
        with open_adapter(file) as stored:
            digests.add(sources[stored.digest])
    assert digests == live
    assert not list((data / "uploads").iterdir())
