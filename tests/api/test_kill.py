"""kill -9 of the whole server while adapters are registered, replaced and removed: nothing acknowledged is lost,
and nothing is half there.

`HEDDLE_KILLS=50` kills that often.
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

from .peft_reference import reference, text_of
from .server_process import PROMPT, Process

KILLS = int(os.environ.get("HEDDLE_KILLS", "3"))
SEED = int(os.environ.get("HEDDLE_SEED", "20260504"))
SOURCES = ("one", "five", "sixteen")


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

    def act(self, client: httpx.Client, folders: Path, chance: random.Random) -> None:
        """One change, and what it may have come to; an httpx.TransportError leaves that open."""
        now = self.state
        numbers = [number for number, _ in now.versions]
        action = chance.choice(["write", "write", "write", "remove", "remove one", "roll back"])
        if action == "write" or not numbers:
            source = chance.choice([s for s in SOURCES if s != dict(now.versions).get(now.current or 0)])
            number = max([*self.meaning, 0]) + 1
            after = State((*now.versions, (number, source)), number)
            answer = self._try(after, lambda: _write(client, self.name, folders / source, chance))
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
    server: Process, names: list[Name], folders: Path, seed: float, failures: list[BaseException]
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
    server: Process,
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


def found(server: Process, name: str, sources: dict[str, str]) -> State:
    answer = server.client.get(f"/adapters/{name}/versions")
    if answer.status_code == 404:
        return State()
    versions = answer.json()["data"]
    assert all(version["status"] != "failed" for version in versions)
    current = server.client.get(f"/adapters/{name}").json()["version"]
    return State(tuple((v["version"], sources[v["digest"]]) for v in versions), current)


@pytest.mark.timeout(3600)
def test_kill_9_at_random_moments_loses_nothing_and_leaves_nothing_half_done(
    world: dict[str, Path], tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    settings: dict[str, Any] = {
        "engine": {"model": str(world["base"])},
        "served_model_name": "tiny",
        "adapter_roots": [world["adapters"]],
        "data_dir": tmp_path / "data",
    }
    right = {name: text_of(reference(world, name, [*PROMPT.encode()], 12)[0]) for name in SOURCES}
    assert len(set(right.values())) == len(SOURCES)
    names = [Name(f"name-{number}") for number in range(6)]
    server = Process(**settings)
    outstanding = 0
    try:
        server.until_ready()
        plans = {
            name: server.client.post("/adapters?dry_run=true", json={"name": "x", "source": name}).json()
            for name in SOURCES
        }
        sources = {plan["digest"]: name for name, plan in plans.items()}
        for kill in range(KILLS):
            failures: list[BaseException] = []
            heard: list[tuple[str, str]] = []
            threads = [
                threading.Thread(
                    target=hammer, args=(server, part, world["adapters"], chance.random(), failures)
                )
                for part in (names[:2], names[2:4], names[4:])
            ]
            called = [name.name for name in names]
            threads.append(
                threading.Thread(target=use, args=(server, called, chance.random(), heard, failures))
            )
            for thread in threads:
                thread.start()
            enough = sum(name.answered for name in names) + chance.randrange(12)
            patience = time.monotonic() + 20
            while sum(name.answered for name in names) < enough and time.monotonic() < patience:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.2))
            server.kill()
            for thread in threads:
                thread.join()
            if failures:
                raise failures[0]
            outstanding += sum(len(name.possible) == 2 for name in names)
            server = Process(**settings)
            server.until_ready()
            for name in names:
                state = found(server, name.name, sources)
                assert state in name.possible, f"kill {kill}: {name.name} is {state}, not of {name.possible}"
                name.possible = [state]
                name.meaning.update(state.versions)
                for number, source in state.versions:
                    answer = server.complete(adapter=f"{name.name}@{number}")
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["choices"][0]["text"] == right[source]
            check_files(tmp_path / "data", {v for name in names for _, v in name.state.versions}, sources)
            meanings = {f"{name.name}@{n}": source for name in names for n, source in name.meaning.items()}
            for adapter, text in heard:
                if adapter in meanings:  # else its registration was never acknowledged, nor did it last
                    assert text == right[meanings[adapter]]
    finally:
        if server.popen.poll() is None:
            server.kill()
    answered = sum(name.answered for name in names)
    print(f"{KILLS} kills, {answered} changes acknowledged, {outstanding} cut off")
    assert answered
    assert outstanding


def check_files(data: Path, live: set[str], sources: dict[str, str]) -> None:
    """The stored files are just those of live versions, and whole; no upload is left."""
    digests = set()
    for file in (path for path in (data / "blobs").rglob("*") if path.is_file()):
        with open_adapter(file) as stored:
            digests.add(sources[stored.digest])
    assert digests == live
    assert not list((data / "uploads").iterdir())
