"""How much a JSON text holds is counted right without reading it, whatever its strings look like."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import pytest
from heddle.api.http import json_shape


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(containers, value))
    return 0


def commas(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return max(0, len(value) - 1) + sum(map(commas, value)) if isinstance(value, list) else 0


def draw(random: random.Random, depth: int) -> Any:
    """Anything, with strings of all that means something outside of them."""
    kind = random.random()
    if depth == 0 or kind < 0.3:
        return "".join(random.choice('a",{[\\]}\n é') for _ in range(random.randrange(30)))
    items = [draw(random, depth - 1) for _ in range(random.randrange(6))]
    return items if kind < 0.6 else {f'k\\",[{n}': item for n, item in enumerate(items)}


@pytest.mark.parametrize("chunk", [2, 3, 7, 64, json_shape.CHUNK])
def test_lists_and_objects_outside_of_strings_are_counted_and_nothing_else(monkeypatch, chunk):
    monkeypatch.setattr(json_shape, "CHUNK", chunk)
    source = random.Random(chunk)
    for number in range(100):
        value = [draw(source, 5)]
        text = json.dumps(value, ensure_ascii=number % 2 == 0).encode()
        found = json_shape.shape(text)
        assert found.containers == containers(value), text
        assert found.values == containers(value) + commas(value), text


@pytest.mark.parametrize("text", [b"", b"\\", b'"\\', b"\\" * 9, b'"' * 5, b"\xff\xfe"])
def test_a_text_that_is_no_json_is_gone_through_all_the_same(text):
    assert json_shape.shape(text) == (0, 0)


async def test_bodies_are_gone_through_one_after_another(monkeypatch):
    """However many come at once: nor does anybody wait for a thread to be started for each."""
    running = most = 0

    def counted(text: bytes) -> json_shape.Shape:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1
        return json_shape.Shape(len(text), 0)

    monkeypatch.setattr(json_shape, "shape", counted)
    texts = [b"x" * size for size in range(8)]
    found = await asyncio.gather(*map(json_shape.shape_in_thread, texts))
    assert [one.containers for one in found] == list(range(8))
    assert most == 1
