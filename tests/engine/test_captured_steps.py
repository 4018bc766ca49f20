"""Decode steps that replay what was captured at the start, on a stand-in for the GPU that would do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from heddle import LLM, SamplingParams
from heddle.core.config import EngineConfig
from heddle.core.engine import batch, step_graphs
from heddle.core.engine.engine import Engine
from heddle.core.engine.step_buffers import StepBuffers
from heddle.core.engine.step_graphs import padded_sizes
from heddle.core.errors import EngineStartError
from heddle.core.scheduling.plan import Chunk

from .recording_accelerator import Recorder, SameLaunches

Start = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
BLOCK = 4096
"""Bytes of a block of the tiny base."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What every engine of the test takes its device for."""
    stand_in = Recorder()
    monkeypatch.setattr("heddle.core.engine.accelerator.for_device", lambda device: stand_in)
    return stand_in


def compare_replays(llm: LLM) -> list[int]:
    """From now on every replay is compared with the same step run eagerly: hidden states and blocks, bit for bit.

    Returns the list that receives the number of rows of each step that was replayed.
    """
    runner = llm._engine._runner
    graphs, pool, rows = runner.graphs, runner._pool, []
    assert graphs is not None
    replay = graphs.forward

    def both(chunks: Sequence[Chunk]) -> torch.Tensor | None:
        pool.memory[pool.num_blocks :] = 0xFF  # the padding's block holds NaN
        before = pool.memory.clone()
        hidden = replay(chunks)
        if hidden is None:
            assert torch.equal(pool.memory, before), "nothing was written"
            return None
        after = pool.memory.clone()
        pool.memory.copy_(before)
        step = batch.build(chunks, runner._tables, pool.layout.block_size, runner._accelerator)
        assert torch.equal(hidden, runner._model.forward(step, pool))
        assert torch.equal(after[: pool.num_blocks], pool.memory[: pool.num_blocks]), "only live rows write"
        rows.append(len(chunks))
        return hidden

    graphs.forward = both  # type: ignore[method-assign]
    return rows


def test_replays_equal_the_eager_steps_bit_for_bit_and_touch_no_block_but_their_own(
    start: Start, recorder: Recorder, prompts: list[list[int]]
) -> None:
    """Streams that end one after another, so that every number of rows up to 7 occurs, padded to 8, 4, 2 and 1."""
    names = [None, "r1", "r5", "r64", "r5", None, "r16"]
    lengths = [SamplingParams(max_tokens=8 + 3 * n, temperature=0.0, ignore_eos=True) for n in range(7)]
    eager = start(enforce_eager=True).generate(prompts[2:9], lengths, adapter=names)
    llm = start(enforce_eager=False, max_num_seqs=8)
    compared = compare_replays(llm)
    captured = len(recorder.captured)
    outputs = llm.generate(prompts[2:9], lengths, adapter=names)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in eager]
    assert set(compared) == set(range(1, 8))
    assert captured == len(recorder.captured) == 2 * len(padded_sizes(8)) == 8
    base = [o.outputs[0].token_ids for o in llm.generate(prompts[2:5], GREEDY)]
    assert base == [o.outputs[0].token_ids for o in start(enforce_eager=True).generate(prompts[2:5], GREEDY)]
    assert len(set(recorder.replays)) >= 5, "with adapters and without, of several sizes"


def test_only_decodes_of_at_most_one_adapter_a_row_are_replayed(
    start: Start, recorder: Recorder, prompts: list[list[int]]
) -> None:
    llm = start(enforce_eager=False, enable_prefix_caching=False)
    compared = compare_replays(llm)
    two = [{"name": "r4", "weight": 0.7}, {"name": "r8", "weight": -0.4}]
    llm.generate([prompts[8]], GREEDY, adapter=[two])
    assert compared == []
    llm.generate([prompts[8]], GREEDY, adapter=["r4"])
    assert compared == [1] * 5, "the first of six tokens comes from the prompt's step"


def test_a_long_context_runs_eagerly(
    start: Start, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graphs, "CONTEXT_LIMIT", 32)
    llm = start(enforce_eager=False)
    compared = compare_replays(llm)
    llm.generate([list(range(2, 30))], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert len(compared) == 4, "positions 28 to 31"


def test_adapters_that_come_go_and_move_between_replays_are_seen(
    start: Start, recorder: Recorder, prompts: list[list[int]]
) -> None:
    adapters_come_go_and_move(start, prompts)


def adapters_come_go_and_move(start: Start, prompts: list[list[int]]) -> None:
    """A pool in which r64 leaves little room: adapters are evicted, blocks and slots change hands, tables move."""
    order = ["r1", "r16", "r64", "r5", "r64", "r8", "r16", "r5", "r1", "r64"]
    small = {"pool_memory": 80 * BLOCK, "max_num_seqs": 2}
    eager, llm = start(enforce_eager=True, **small), start(enforce_eager=False, **small)
    compared = compare_replays(llm)
    for turn, name in enumerate(order):
        asked = [prompts[turn], prompts[turn + 1]]
        expected = eager.generate(asked, GREEDY, adapter=[name, None])
        found = llm.generate(asked, GREEDY, adapter=[name, None])
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected], turn
    assert llm._engine._residency.stats()["adapter_evictions"] > 2
    assert len(compared) >= 40
    assert {1, 2} == set(compared)


def test_an_adapter_replaced_under_its_name_is_seen(
    start: Start, recorder: Recorder, adapters: dict[str, Any], prompts: list[list[int]]
) -> None:
    llm = start(enforce_eager=False, adapters={"a": adapters["r4"]})
    compare_replays(llm)
    expected = start().generate([prompts[4]], GREEDY, adapter=["r5"])[0].outputs[0].token_ids
    before = llm.generate([prompts[4]], GREEDY, adapter=["a"])[0].outputs[0].token_ids
    llm.load_adapter("a", adapters["r5"])
    assert llm.generate([prompts[4]], GREEDY, adapter=["a"])[0].outputs[0].token_ids == expected != before


def test_capturing_shows_its_progress_and_writes_to_nobody_s_block(base: Any, recorder: Recorder) -> None:
    shown: list[tuple[str, int, int]] = []
    config = EngineConfig(model=str(base), pool_memory=64 * BLOCK, enforce_eager=False, max_num_seqs=5)
    engine = Engine(config, lambda *what: shown.append(what))
    try:
        steps = [step for step in shown if step[0] == "Capturing decode steps"]
        assert steps == [
            ("Capturing decode steps", done, 8) for done in range(9)
        ]  # 1, 2, 4 and 5 rows, twice
        assert engine.ready.num_blocks == 63
        assert not any("--no-enforce-eager" in note for note in engine.ready.notes)
        pool = engine._pool.memory
        assert not pool[:63].any()
        assert pool[63].any()
        report = engine.ready.memory
        assert report is not None
        assert sum(part.bytes for part in report.pool) == report.pool_bytes == 64 * BLOCK
    finally:
        engine.close()


def test_memory_that_does_not_suffice_for_capturing_is_named(
    base: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(function: Callable[[], torch.Tensor]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(recorder, "capture", no_memory)
    with pytest.raises(EngineStartError, match="no memory left for captured steps"):
        Engine(EngineConfig(model=str(base), pool_memory=64 * BLOCK, enforce_eager=False))


def test_a_replay_reads_exactly_what_was_filled_in_at_the_same_addresses() -> None:
    recorder = Recorder()
    buffers = StepBuffers(recorder, most=4, table_width=3, block_size=16, spare=99)
    arrays = {
        "token_ids": np.array([7, 8], np.int64),
        "positions": np.array([20, 3], np.int64),
        "slot_mapping": np.array([5 * 16 + 4, 6 * 16 + 3], np.int64),
        "block_tables": np.array([[4, 5], [6, 0]], np.int32),
        "cu_seqlens_q": np.array([0, 1, 2], np.int32),
        "context_lens": np.array([21, 4], np.int32),
        "pair_rows": np.array([1], np.int32),
        "pair_weights": np.array([0.5], np.float32),
        "starts": np.array([0, 1], np.int32),
        "slots": np.array([3], np.int32),
    }  # fmt: skip
    tables: Any = object()
    step = buffers.batch(4, tables)
    assert step.lora is not None
    for rows in (2, 1, 0, 2):  # what an earlier step left does not show
        given = {name: array[: len(array) - 2 + rows] for name, array in arrays.items()} if rows else {}
        if rows == 1:
            given |= {name: arrays[name] for name in ("pair_rows", "pair_weights", "starts", "slots")}
        buffers.fill(given, 4)
        recorder.send_now()
        pad, pairs = 4 - rows, min(rows, 1)
        assert step.token_ids.tolist() == [7, 8][:rows] + [0] * pad
        assert step.positions.tolist() == [20, 3][:rows] + [0] * pad
        assert step.attention.slot_mapping.tolist() == [84, 99][:rows] + [99 * 16] * pad
        tables_now = [[4, 5, 0], [6, 0, 0]][:rows] + [[99, 0, 0]] * pad
        assert step.attention.block_tables.tolist() == tables_now
        assert step.attention.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
        assert step.attention.context_lens.tolist() == [21, 4][:rows] + [1] * pad
        assert step.attention.max_query_len == 1
        assert step.lora.starts.tolist() == [0] + [pairs] * 4
        assert step.lora.slots.tolist() == [3][:pairs] + [0] * (4 - pairs)
        assert step.lora.pair_rows.tolist() == [1][:pairs] + [0] * (4 - pairs)
        assert step.lora.pair_weights.tolist() == [0.5][:pairs] + [0.0] * (4 - pairs)
        assert step.lora.rounds == (0, 4)
        again = buffers.batch(4, tables)
        assert again.token_ids.data_ptr() == step.token_ids.data_ptr()
        assert again.attention.block_tables.data_ptr() == step.attention.block_tables.data_ptr()


def test_pages_copied_aside_are_used_only_once_they_have_arrived(
    start: Start, recorder: Recorder, prompts: list[list[int]]
) -> None:
    """The stand-in fills their blocks with NaN until it is asked a second time whether they are there."""
    expected = start().generate([prompts[3]], GREEDY, adapter=["r64"])[0].outputs[0].token_ids
    llm = start(enforce_eager=True)
    assert llm.generate([prompts[3]], GREEDY, adapter=["r64"])[0].outputs[0].token_ids == expected
    assert any(entry.startswith("aside") for entry in recorder.log)
    assert "join" not in recorder.log, "no step waits for pages"


def test_triton_s_launches_replayed_as_they_were_captured_give_everybody_s_tokens(
    start: Start, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay repeats kernels with the arguments they had at capture: whatever a step depends on must be in memory."""
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    chosen, names = [prompts[8], prompts[1]], ["r5", None]
    expected = [o.outputs[0].token_ids for o in start().generate(chosen, greedy, adapter=names)]
    stand_in = SameLaunches()
    monkeypatch.setattr(step_graphs, "padded_sizes", lambda most: [2])
    monkeypatch.setattr("heddle.core.engine.accelerator.for_device", lambda device: stand_in)
    llm = start(backend="triton", enforce_eager=False, max_num_seqs=2)
    outputs = llm.generate(chosen, greedy, adapter=names)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert set(stand_in.replays) == {0, 1}, "base and adapter, each alone and padded to two rows"
