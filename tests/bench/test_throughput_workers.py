"""Workers as real processes over a tiny random model: what they say is counted, and nothing of them stays."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from pathlib import Path

import peft
import psutil
import pytest
import torch
import transformers
from heddle.bench.throughput import measure
from heddle.bench.throughput.rows import Row
from heddle.bench.throughput.serving import Worker, WorkerFailed
from heddle.bench.throughput.vllm_metadata import write_metadata
from heddle.bench.throughput.workload import Cell, Size, make_adapters
from heddle.core.checkpoint import demo
from heddle.core.model.config import ModelConfig

OURS = Row("tiny", "Heddle", "heddle_engine", {"quantization": "int8"})
PEFT = Row("peft", "PEFT", "transformers_peft")
PATIENCE = 500
"""Seconds: only a worker that hangs takes so long, on however busy a machine."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(ModelConfig.load(base), 2, tmp_path_factory.mktemp("adapters"))


def setup(base: Path, adapters: dict[str, Path], options: dict[str, object]) -> dict[str, object]:
    return {
        "base": str(base), "adapters": {name: str(path) for name, path in adapters.items()}, "max_rank": 16,
        "threads": 1, "max_streams": 2, "max_tokens": 16, "options": options,
    }  # fmt: skip


@pytest.mark.parametrize("row", [OURS, PEFT], ids=["heddle", "peft"])
def test_every_request_has_a_moment_for_each_of_its_tokens(row, base, adapters, tmp_path):
    with Worker(row, 1, tmp_path / "log", PATIENCE) as worker:
        process = psutil.Process(worker.pid)
        before = worker.imported_bytes
        assert worker.ask(setup(base, adapters, dict(row.options))) == {"ready": True}
        requests = [{"prompt": [1, 2, 3], "adapter": "a0"}, {"prompt": [4, 5, 6], "adapter": "a1"}]
        for _ in range(2):
            told = worker.ask({"requests": requests, "new": 5})
            assert [len(times) for times in told["times"]] == [5, 5]
            for times in told["times"]:
                assert times == sorted(times)
                assert 0 < times[0] < times[-1] <= told["seconds"]
        facts = worker.ask({})
        assert facts["version"]
        assert worker.peak_bytes() > before > 1 << 20
    assert not process.is_running()


def test_a_worker_that_fails_says_why_and_is_gone(base, adapters, tmp_path):
    with (
        pytest.raises(WorkerFailed, match="nowhere"),
        Worker(OURS, 1, tmp_path / "log", PATIENCE) as worker,
    ):
        worker.ask(setup(tmp_path / "nowhere", {}, {}))
    assert not psutil.pid_exists(worker.pid)


def test_a_worker_that_does_not_answer_is_ended(base, tmp_path):
    with Worker(OURS, 1, tmp_path / "log", PATIENCE) as worker:
        worker.patience = 0.0
        with pytest.raises(WorkerFailed, match="no answer in 0 seconds"):
            worker.ask(setup(base, {}, {}))
        worker.close(grace=0.0)
        assert not psutil.pid_exists(worker.pid)


def test_rows_that_cannot_run_are_left_out_and_the_others_measured(base, tmp_path, monkeypatch):
    for place in (measure, demo):
        monkeypatch.setattr(place, "demo_base", lambda: base)
    missing = Row("vllm", "vLLM", "vllm_cpu", environment=".peers-nobody")
    wrong = Row("wrong", "Wrong", "heddle_engine", {"quantization": "gptq"})
    plan = [Cell(Size(5, 3), 1, 0), Cell(Size(5, 3), 2, 2)]
    terms = measure.Terms(threads=1, seconds=0.0, patience=PATIENCE, logs=tmp_path, say=lambda line: None)
    made: list[measure.RowFigures] = []
    measure.measure([missing, wrong, OURS], plan, terms, made)
    assert [row.name for row in made] == ["vllm", "wrong", "tiny"]
    assert "make peers-nobody" in (made[0].left_out or "")
    assert "quantization gptq needs a checkpoint in that form" in (made[1].left_out or "")
    assert made[2].left_out is None
    assert [(cell.streams, cell.adapters, cell.rounds) for cell in made[2].cells] == [(1, 0, 1), (2, 2, 1)]
    assert all(cell.whole > 0 and cell.first_ms.p50 > 0 and cell.peak_bytes > 0 for cell in made[2].cells)
    assert made[2].facts["weights"] == "int8"


def test_peft_loads_the_adapters_and_they_change_its_answers(base, adapters):
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        plain = model(ids).logits
        adapted = peft.PeftModel.from_pretrained(model, adapters["a0"])
        assert adapted.peft_config["default"].r == 4
        assert not torch.allclose(adapted(ids).logits, plain)


def test_vllm_finds_itself_under_its_own_name(tmp_path: Path):
    write_metadata(tmp_path, "0.32.0")
    (found,) = distributions(path=[os.fspath(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
