"""Which memory `cuda.Cuda` captures graphs into, on a stand-in for torch's part of it: no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from heddle.core.engine.cuda import Cuda


class Graph:
    """As torch's: a memory lives as long as a graph in it does, and is not to be named afterwards."""

    alive: ClassVar[WeakSet[Graph]] = WeakSet()
    memories = 0

    def __init__(self) -> None:
        self.memory = -1

    def pool(self) -> int:
        return self.memory

    def replay(self) -> None:
        return


@contextmanager
def capturing(graph: Graph, pool: int | None = None) -> Iterator[None]:
    if pool is None:
        Graph.memories += 1
        pool = Graph.memories
    elif pool not in {other.memory for other in Graph.alive}:
        raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
    graph.memory = pool
    Graph.alive.add(graph)
    yield


class Anything:
    """A stream or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        return


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(Graph, "memories", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "Stream", Anything)
    monkeypatch.setattr(torch.cuda, "Event", Anything)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return Cuda(torch.device("cuda"))


def result() -> torch.Tensor:
    return torch.zeros(1)


def test_graphs_share_one_memory_while_any_of_them_is_held(cuda: Cuda) -> None:
    held = [cuda.capture(result) for _ in range(3)]
    assert Graph.memories == 1
    del held[0], held[0]
    held.append(cuda.capture(result))
    assert Graph.memories == 1


def test_once_the_last_graph_is_gone_the_next_gets_memory_of_its_own(cuda: Cuda) -> None:
    """A step that is timed is captured, replayed and dropped before the next one."""
    for number in range(1, 4):
        captured = cuda.capture(result)
        captured.replay()
        del captured
        assert Graph.memories == number


def test_a_capture_that_fails_leaves_no_memory_to_be_named(cuda: Cuda) -> None:
    calls = []

    def fails_when_captured() -> torch.Tensor:
        calls.append(len(Graph.alive))
        if len(calls) == 2:  # the first call is made before capturing begins
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result()

    with pytest.raises(torch.OutOfMemoryError):
        cuda.capture(fails_when_captured)
    assert calls == [0, 1]
    assert cuda.capture(result) is not None
    assert Graph.memories == 2
