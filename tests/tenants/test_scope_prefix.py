"""What one tenant's prompts left in the prefix cache no other tenant finds: seen in `cached_tokens`, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..api.server_process import Process, served
from .conftest import ADMIN_KEY

PROMPT = "A prompt that is long enough to fill some blocks of sixteen tokens, one token a byte."
BLOCK = 16


@pytest.fixture(scope="module")
def server(world: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """With its real engine, one sequence at a time; public has the adapter `shared`."""
    with served(
        engine={"model": str(world["base"]), "block_size": BLOCK, "max_num_seqs": 1},
        served_model_name="tiny",
        adapter_roots=[world["adapters"]],
        data_dir=tmp_path_factory.mktemp("prefix"),
        admin_key=ADMIN_KEY,
    ) as process:
        process.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        made = process.client.post("/adapters", json={"name": "shared", "source": "five"})
        assert made.status_code == 201, made.text
        yield process


def tenant(server: Process, name: str) -> httpx.Client:
    assert server.client.post("/tenants", json={"name": name}).status_code == 201
    key = server.client.post(f"/tenants/{name}/keys").json()["key"]
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def cached(client: httpx.Client, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
    """Prompt tokens found in the cache, and the answer."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, **fields}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    return whole["usage"]["prompt_tokens_details"]["cached_tokens"], whole["choices"][0]["text"]


@pytest.mark.parametrize("fields", [{}, {"adapter": "shared"}], ids=["base", "public's adapter"])
def test_prefix_caches_are_not_shared_between_tenants(server: Process, fields: dict[str, Any]) -> None:
    kind = "adapter" if fields else "base"
    a, b = tenant(server, f"a-{kind}"), tenant(server, f"b-{kind}")
    warm = len(PROMPT) - 1
    first = cached(a, **fields)
    assert first[0] == 0
    assert cached(a, **fields) == (warm, first[1]), "a finds its own"
    assert cached(b, **fields) == (0, first[1]), "b has asked nothing yet"
    assert cached(b, **fields) == (warm, first[1])
    assert cached(server.client, **fields) == (0, first[1]), "nor has public"
    assert cached(server.client, **fields) == (warm, first[1])
    inside = f"/tenants/a-{kind}/v1/completions"
    assert cached(server.client, inside, **fields)[0] == warm, "the admin inside a is a"


def test_adapters_of_equal_weights_share_no_prefix_between_tenants(server: Process) -> None:
    """One digest, held by two tenants: the weights are in memory once, what was said with them is not shared."""
    a, b = tenant(server, "a-same"), tenant(server, "b-same")
    digests = {
        client.post("/adapters", json={"name": "mine", "source": "sixteen"}).json()["digest"]
        for client in (a, b)
    }
    assert len(digests) == 1
    assert [cached(client, adapter="mine")[0] for client in (a, b, a, b)] == [
        0,
        0,
        len(PROMPT) - 1,
        len(PROMPT) - 1,
    ]


def test_a_tenant_made_again_finds_nothing_the_one_before_it_left(server: Process) -> None:
    first = tenant(server, "again")
    assert [cached(first)[0] for _ in range(2)] == [0, len(PROMPT) - 1]
    assert server.client.delete("/tenants/again").status_code == 204
    second = tenant(server, "again")
    assert [cached(second)[0] for _ in range(2)] == [0, len(PROMPT) - 1]


def test_a_tenant_made_again_finds_nothing_that_the_one_before_it_computed_since(server: Process) -> None:
    """The removed tenant's request waits behind public's while the new one is made, and runs after that."""
    first = tenant(server, "late")
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as pool, server.client.stream("POST", "/v1/completions", json=long) as running:
        lines = running.iter_lines()
        next(lines)
        queued = pool.submit(cached, first)
        while server.client.get("/metrics").text.count("heddle_waiting 1.0") != 1:
            assert not queued.done()
        assert server.client.delete("/tenants/late").status_code == 204
        second = tenant(server, "late")
        assert not queued.done()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert queued.result()[0] == 0
    assert [cached(second)[0] for _ in range(2)] == [0, len(PROMPT) - 1]
    assert second.get("/tenants/late/usage").json()["requests"] == 2, "and is not charged for it"


def test_usage_of_a_tenant_made_again_begins_at_nothing(server: Process) -> None:
    first = tenant(server, "counted")
    cached(first)
    assert first.get("/tenants/counted/usage").json()["requests"] == 1
    cached(first)
    assert server.client.delete("/tenants/counted").status_code == 204
    second = tenant(server, "counted")
    usage = second.get("/tenants/counted/usage").json()
    assert (usage["requests"], usage["prompt_tokens"], usage["adapters"]) == (0, 0, 0)
