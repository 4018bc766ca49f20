"""From moments to figures: checked against hand arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from heddle.bench.throughput import energy
from heddle.bench.throughput.figures import Figures, Round, WrongAnswer
from heddle.bench.throughput.workload import Cell, Size, operations
from heddle.core.model.config import ModelConfig

CELL = Cell(Size(10, 3), 2, 0)
STAGGERED = Round(seconds=5.0, times=[[1.0, 2.0, 4.0], [2.0, 3.0, 5.0]])
"""Two streams: both decode from second 2 to second 4, in which three tokens come (at 3, and 4; one at 2 is before)."""
LOCKSTEP = Round(seconds=4.0, times=[[2.0, 3.0, 4.0], [2.0, 3.0, 4.0]])


def test_whole_requests_count_every_token_over_all_of_the_time():
    assert STAGGERED.whole() == 6 / 5
    assert LOCKSTEP.whole() == 6 / 4


def test_decode_is_counted_only_while_every_stream_decodes():
    assert STAGGERED.decode() == 2 / 2
    assert LOCKSTEP.decode() == 4 / 2


def test_streams_that_never_decode_together_have_no_decode_speed():
    assert Round(seconds=4.0, times=[[1.0, 2.0], [3.0, 4.0]]).decode() is None


def test_latencies_are_of_all_rounds_and_speeds_their_median():
    slow = Round(seconds=10.0, times=[[3.0, 5.0, 10.0], [3.0, 5.0, 10.0]])
    made = Figures.of(CELL, [STAGGERED, LOCKSTEP, slow], peak_bytes=7, operations=3e9)
    assert made.whole == pytest.approx(6 / 5)
    assert made.first_ms.count == 6
    assert made.first_ms.p50 == pytest.approx(2000)  # of 1, 2, 2, 2, 3, 3
    assert made.between_ms is not None
    assert made.between_ms.max == pytest.approx(5000)
    assert made.gops == pytest.approx(6 / 5 / 3 * 3)  # requests a second times 3e9
    assert (made.rounds, made.peak_bytes, made.prefill) == (3, 7, None)


def test_prefill_is_the_prompt_over_the_time_to_the_first_token_of_one_stream():
    made = Figures.of(Cell(Size(10, 2), 1, 0), [Round(seconds=3.0, times=[[2.0, 3.0]])], 0, 0)
    assert made.prefill == pytest.approx(5)


@pytest.mark.parametrize("times", [[[1.0, 2.0, 3.0], [1.0, 2.0]], [[1.0, 2.0, 3.0]]])
def test_a_round_with_missing_tokens_gives_no_figure(times):
    with pytest.raises(WrongAnswer, match="asked for 3 tokens"):
        Round(seconds=1.0, times=times).check(CELL)


def test_energy_is_given_only_where_every_round_had_some():
    rounds = [
        Round(seconds=1.0, times=LOCKSTEP.times, joules=3.0),
        Round(seconds=1.0, times=LOCKSTEP.times, joules=9.0),
    ]
    assert Figures.of(CELL, rounds, 0, 0).joules_per_token == pytest.approx(1.0)
    assert Figures.of(CELL, [*rounds, LOCKSTEP], 0, 0).joules_per_token is None


def test_counters_of_energy_are_summed_over_packages_and_begin_anew(tmp_path: Path):
    for zone, value in {"intel-rapl:0": 900, "intel-rapl:1": 100, "intel-rapl:0:0": 5}.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "energy_uj").write_text(f"{value}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("1000\n")
    before = energy.read(tmp_path)
    assert sorted(before.values()) == [100, 900]
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("50\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("300\n")
    assert energy.joules(before, energy.read(tmp_path)) == pytest.approx((150 + 200) / 1e6)


def test_a_machine_without_counters_has_no_energy(tmp_path: Path):
    assert energy.joules(energy.read(tmp_path), energy.read(tmp_path)) is None


def test_operations_of_a_request(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 100,'
        '"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16,'
        '"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}'
    )
    layer = 8 * 8 + 4 * 8 + 4 * 8 + 8 * 8 + 3 * 8 * 16
    assert operations(ModelConfig.load(tmp_path), Size(10, 4)) == 2 * (3 * layer * 13 + 800 * 4)
