"""Decode steps of a CPU that are recorded once and replayed: bit for bit what they would be without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle import LLM, SamplingParams
from heddle.core.engine import step_graphs
from heddle.kernels import cpu
from heddle.kernels.cpu.recording import Workspace, record
from safetensors.torch import load_file, save_file

from .test_captured_steps import GREEDY, adapters_come_go_and_move, compare_replays

Start = Callable[..., LLM]


def test_every_step_of_decodes_equals_the_eager_one(start: Start, prompts: list[list[int]]) -> None:
    """Streams that end one after another: every number of rows from 7 to 1, recorded first and then replayed."""
    names = [None, "r1", "r5", "r64", "r5", None, "r16"]
    lengths = [SamplingParams(max_tokens=8 + 3 * n, temperature=0.0, ignore_eos=True) for n in range(7)]
    eager = start(enforce_eager=True).generate(prompts[2:9], lengths, adapter=names)
    llm = start(max_num_seqs=8)
    compared = compare_replays(llm)
    for _ in range(2):
        outputs = llm.generate(prompts[2:9], lengths, adapter=names)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in eager]
        assert set(compared) == set(range(1, 8)), "no row is padding"
    graphs = llm._engine._runner.graphs
    assert graphs is not None
    assert not graphs._fails


def test_adapters_that_come_go_and_move_between_replays_are_seen(
    start: Start, prompts: list[list[int]]
) -> None:
    adapters_come_go_and_move(start, prompts)


def test_an_adapter_replaced_under_its_name_is_seen(
    start: Start, adapters: dict[str, Path], prompts: list[list[int]]
) -> None:
    llm = start(adapters={"a": adapters["r4"]})
    compare_replays(llm)
    expected = start().generate([prompts[4]], GREEDY, adapter=["r5"])[0].outputs[0].token_ids
    before = llm.generate([prompts[4]], GREEDY, adapter=["a"])[0].outputs[0].token_ids
    llm.load_adapter("a", adapters["r5"])
    assert llm.generate([prompts[4]], GREEDY, adapter=["a"])[0].outputs[0].token_ids == expected != before


@pytest.fixture(scope="module")
def tied_base(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with its embedding for a head."""
    folder = tmp_path_factory.mktemp("tied") / "base"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("quantize_head", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_head_that_is_the_embedding_is_recorded_too(
    start: Start, tied_base: Path, prompts: list[list[int]], quantization: str, quantize_head: bool
) -> None:
    settings = {"model": tied_base, "quantization": quantization, "quantize_head": quantize_head}
    llm = start(**settings)
    compared = compare_replays(llm)
    expected, found = (
        one.generate(prompts[:3], GREEDY) for one in (start(**settings, enforce_eager=True), llm)
    )
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert compared
    assert not llm._engine._runner.graphs._fails


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({"quantization": "int8"}, True),
        ({"quantization": "int8", "int8_activations": True}, True),
        ({"quantization": "int8", "quantize_head": True}, True),
        ({"kv_cache_dtype": "int8"}, True),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_what_is_recorded_and_what_is_known_not_to_be(
    start: Start, prompts: list[list[int]], settings: dict[str, Any], recorded: bool
) -> None:
    """Activations of 16 bits are rounded by torch between kernels: a recording would leave that out."""
    eager, llm = start(enforce_eager=True, **settings), start(**settings)
    compared = compare_replays(llm) if recorded else []
    names = ["r4", None, "r8"]
    expected, found = (one.generate(prompts[:3], GREEDY, adapter=names) for one in (eager, llm))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    graphs = llm._engine._runner.graphs
    assert graphs is not None
    assert graphs._fails != recorded
    assert bool(compared) == recorded


def test_enforce_eager_records_nothing(start: Start) -> None:
    assert start(enforce_eager=True)._engine._runner.graphs is None


def test_steps_of_many_rows_run_eagerly(
    start: Start, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    monkeypatch.setattr(step_graphs, "RECORDED_BYTES", 1)
    llm = start()
    compared = compare_replays(llm)
    llm.generate(prompts[:2], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 9)])
    assert set(compared) == {1}


def test_what_a_replay_would_leave_out_is_not_recorded() -> None:
    x, weight = torch.randn(3, 16), cpu.hold(torch.randn(8, 16))
    assert record(lambda: cpu.linear(x, weight, None), Workspace()) is not None
    assert (
        record(lambda: cpu.linear(x, weight, None).unflatten(1, (2, 4)).flatten(1), Workspace()) is not None
    )
    for function in (
        lambda: cpu.linear(x * 2, weight, None),
        lambda: cpu.linear(x, weight, None).add_(1),
        lambda: torch.cat([cpu.linear(x, weight, None)] * 2),
        lambda: cpu.linear(x.half(), weight, None),
    ):
        assert record(function, Workspace()) is None


def test_recordings_share_memory_and_see_their_inputs_anew() -> None:
    workspace, x = Workspace(), torch.randn(3, 16)
    weights = [cpu.hold(torch.randn(8, 16)) for _ in range(2)]
    first, second = (record(lambda w=w: cpu.linear(x, w, None), workspace) for w in weights)  # type: ignore[misc]
    assert first is not None
    assert second is not None
    assert first.output.data_ptr() == second.output.data_ptr()
    x.copy_(torch.randn(3, 16))
    for recording, weight in ((first, weights[0]), (second, weights[1])):
        recording.replay()
        assert torch.equal(recording.output, cpu.linear(x, weight, None))


def test_a_workspace_grows_and_never_gives_the_same_memory_twice() -> None:
    workspace = Workspace()
    for _ in range(2):
        workspace.restart()
        taken = [
            workspace.take(shape) for shape in ((3, 5), (1 << 20,), (1 << 21,), (0, 4), (1 << 22, 2), (7,))
        ]
        for number, tensor in enumerate(taken):
            tensor.fill_(number)
        assert all((tensor == number).all() for number, tensor in enumerate(taken))
        assert [tensor.shape[0] for tensor in taken] == [3, 1 << 20, 1 << 21, 0, 1 << 22, 7]


def test_a_workspace_gives_again_what_nothing_refers_to() -> None:
    """A view refers to it as well; after a restart what was taken before counts for nothing."""
    workspace = Workspace()
    first = workspace.take((3, 5))
    place, view = first.data_ptr(), first[1:, 2:]
    del first
    assert workspace.take((3, 5)).data_ptr() != place
    del view
    again = workspace.take((5, 3))
    assert again.data_ptr() == place
    workspace.restart()
    second = workspace.take((3, 5))
    assert second.data_ptr() == place
    del again
    assert workspace.take((3, 5)).data_ptr() != place


def test_a_recorded_chain_of_layers_takes_the_memory_of_one_and_computes_the_same() -> None:
    workspace, x = Workspace(), torch.randn(1024, 256)
    weights = [cpu.hold(torch.randn(256, 256) / 16) for _ in range(2)]

    def layers() -> torch.Tensor:
        hidden = x
        for number in range(8):
            hidden = cpu.linear(hidden, weights[number % 2], None)
        return hidden

    recording = record(layers, workspace)
    assert recording is not None
    assert len(recording.calls) == 8
    assert workspace.nbytes == 2 * x.nbytes
    x.copy_(torch.randn(1024, 256))
    recording.replay()
    assert torch.equal(recording.output, layers())
