"""One adapter on a real server: everything at once on one name, and what is wrong with it costs nobody else."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from .peft_reference import reference, text_of
from .server_process import PROMPT, Process, served

SOURCES = ("one", "five", "sixteen")


@pytest.fixture(scope="module")
def right(world: dict[str, Path]) -> dict[str | None, str]:
    """Greedy answers by PEFT."""
    return {name: text_of(reference(world, name, [*PROMPT.encode()], 12)[0]) for name in (None, *SOURCES)}


@pytest.fixture(scope="module")
def server(world: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    home = tmp_path_factory.mktemp("one-adapter")
    config = (world["adapters"] / "one" / "adapter_config.json").read_bytes()
    one = load_file(world["adapters"] / "one" / "adapter_model.safetensors")
    brink = {name: tensor * np.float32(1e36 if "lora_B" in name else 1) for name, tensor in one.items()}
    absurd = {name: np.full_like(tensor, 1e30) for name, tensor in one.items()}
    for name, tensors in (("absurd", absurd), ("brink", brink)):
        (home / name).mkdir()
        save_file(tensors, home / name / "adapter_model.safetensors")
        (home / name / "adapter_config.json").write_bytes(config)
    with served(
        engine={"model": str(world["base"])},
        served_model_name="tiny",
        adapter_roots=[world["adapters"], home],
        data_dir=home / "data",
    ) as process:
        yield process


def register(server: Process, name: str, source: str, **fields: Any) -> httpx.Response:
    return server.client.post("/adapters", json={"name": name, "source": source, **fields})


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def failure(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def test_generating_replacing_rolling_back_and_removing_one_name_at_once_is_one_history(
    server: Process, right: dict[str | None, str]
) -> None:
    """No number ever means two weights, every answer is right for the version it names, and what is left is what
    the last changes say."""
    written: dict[int, str] = {}
    heard: list[tuple[str, str]] = []
    done = threading.Event()

    def write(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(12):
            action = chance.randrange(6)
            if action < 3:
                source = chance.choice(SOURCES)
                answer = register(server, "busy", source, replace=action > 0)
                assert answer.status_code in (200, 201, 409), answer.text
                if answer.status_code == 201:
                    assert written.setdefault(answer.json()["version"], source) == source
            elif action < 5:
                ref = "busy" if action == 3 else f"busy@{chance.randrange(1, 2 + max(written, default=1))}"
                assert server.client.delete(f"/adapters/{ref}").status_code in (204, 404)
            else:
                body = {"version": chance.randrange(1, 2 + max(written, default=1))}
                assert server.client.patch("/adapters/busy", json=body).status_code in (200, 404)

    def use(seed: int) -> None:
        chance = random.Random(seed)
        while not done.is_set():
            ref = chance.choice(["busy", f"busy@{chance.randrange(1, 2 + max(written, default=1))}"])
            answer = server.complete(adapter=ref)
            if answer.status_code == 200:
                heard.append((answer.json()["adapter"], text(answer)))
            else:
                assert failure(answer)[:2] == (404, "model_not_found"), answer.text

    with ThreadPoolExecutor(6) as pool:
        users = [pool.submit(use, seed) for seed in range(3)]
        writers = [pool.submit(write, seed) for seed in range(3, 6)]
        try:
            for writer in writers:
                writer.result()
        finally:
            done.set()
        for user in users:
            user.result()
    assert heard
    for adapter, answered in heard:
        name, _, number = adapter.partition("@")
        assert (name, answered) == ("busy", right[written[int(number)]])
    assert register(server, "busy", "one", replace=True).status_code in (200, 201)
    left = server.client.get("/adapters/busy/versions").json()["data"]
    numbers = [version["version"] for version in left]
    assert numbers == sorted(set(numbers))
    assert server.client.get("/adapters/busy").json()["version"] in numbers
    assert text(server.complete(adapter="busy")) == right["one"]
    for version in left:
        if version["version"] in written:
            assert (
                text(server.complete(adapter=f"busy@{version['version']}"))
                == right[written[version["version"]]]
            )
    assert server.client.delete("/adapters/busy").status_code == 204


@pytest.mark.parametrize("place", ["in the header", "in the weights", "cut off", "gone"])
def test_a_stored_file_that_rots_fails_its_own_adapter_alone_until_it_is_registered_again(
    server: Process, right: dict[str | None, str], tmp_path: Path, place: str
) -> None:
    register(server, "sound", "sixteen")
    receipt = register(server, "rotten", "five", preload=False).json()
    server.client.post("/adapters/rotten/evict", json={"to": "disk"})
    data = Path(json.loads(server.popen.args[4])["data_dir"])  # type: ignore[index, arg-type]
    (file,) = data.rglob(f"{receipt['digest'].removeprefix('sha256:')}.safetensors")
    whole = bytearray(file.read_bytes())
    spoilt = bytearray(whole)
    if place == "gone":
        file.unlink()
    elif place == "cut off":
        file.write_bytes(whole[:-5])
    else:
        spoilt[40 if place == "in the header" else len(whole) - 40] ^= 4
        file.write_bytes(spoilt)
    for _ in range(2):
        status, code, message = failure(server.complete(adapter="rotten"))
        assert (status, code) == (503, "adapter_failed")
        assert f"rotten@{receipt['version']}" in message
        assert receipt["digest"][7:19] not in message
        assert ("missing" if place == "gone" else "damaged") in message
        shown = server.client.get("/adapters/rotten").json()
        assert shown["status"] == "failed"
        assert f"rotten@{receipt['version']}" in shown["error"]
        assert text(server.complete(adapter="sound")) == right["sixteen"]
        assert text(server.complete()) == right[None]
    assert failure(server.client.post("/adapters/rotten/load"))[:2] == (503, "adapter_failed")
    again = register(server, "rotten", "five")
    assert (again.status_code, again.json()["status"], again.json()["error"]) == (200, "ready", None)
    assert file.read_bytes() == whole
    assert text(server.complete(adapter="rotten")) == right["five"]
    assert server.client.get("/adapters/rotten").json()["status"] == "ready"
    assert server.client.delete("/adapters/rotten").status_code == 204


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"echo": True, "logprobs": 1, "max_tokens": 0}])
def test_an_adapter_whose_numbers_overflow_is_named_and_is_not_the_servers_fault(
    server: Process, right: dict[str | None, str], fields: dict[str, Any]
) -> None:
    assert register(server, "absurd", "absurd").status_code in (200, 201)
    status, code, message = failure(server.complete(adapter="absurd", **fields))
    assert (status, code) == (503, "adapter_failed")
    assert "absurd@" in message
    assert "not finite" in message
    assert text(server.complete()) == right[None]
    register(server, "sound", "sixteen")
    assert text(server.complete(adapter="sound")) == right["sixteen"]


def overflows(server: Process, ref: str) -> bool:
    """Whether an adapter's requests had logits that were not finite, as its warnings say."""
    shown = server.client.get(f"/adapters/{ref}").json()
    assert (shown["status"], shown["error"]) == ("ready", None), "others of its requests may do"
    return any("logits overflow" in warning for warning in shown["warnings"])


def test_an_adapters_warnings_say_that_its_numbers_overflowed(server: Process) -> None:
    server.client.delete("/adapters/absurd")  # the same weights: what is known of them would be known of both
    assert register(server, "warned", "absurd").status_code == 201
    register(server, "sound", "sixteen")
    server.client.post("/adapters/warned/evict", json={"to": "disk"})
    for ref in ("sound", [{"name": "sound", "weight": 1.0}]):
        assert server.complete(adapter=ref).status_code == 200
    assert not overflows(server, "warned")
    assert failure(server.complete(adapter="warned"))[1] == "adapter_failed"
    assert overflows(server, "warned")
    assert overflows(server, "warned@1")
    listed = server.client.get("/adapters/warned/versions").json()["data"]
    assert [any("overflow" in warning for warning in one["warnings"]) for one in listed] == [True]
    assert server.client.post("/adapters/warned/evict", json={"to": "disk"}).json()["status"] == "ready"
    assert overflows(server, "warned")
    assert not overflows(server, "sound")

    assert register(server, "warned", "five", replace=True).json()["warnings"] == []
    assert server.complete(adapter="warned").status_code == 200
    assert not overflows(server, "warned")
    assert overflows(server, "warned@1"), "that one is as it was"


def test_weights_that_a_request_chose_are_not_held_against_an_adapter(server: Process) -> None:
    """`brink` has numbers that overflow where they are made a hundred times larger."""
    register(server, "absurd", "absurd")
    register(server, "brink", "brink")
    register(server, "sound", "sixteen")
    assert server.complete(adapter="brink").status_code == 200
    for chosen in ([("brink", 100.0)], [("brink", -100.0)], [("absurd", 1.0), ("sound", 1.0)]):
        adapters = [{"name": name, "weight": weight} for name, weight in chosen]
        assert failure(server.complete(adapter=adapters))[1] == "adapter_failed"
        assert not overflows(server, "brink")
        assert not overflows(server, "sound")
