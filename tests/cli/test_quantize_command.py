"""`heddle quantize`, and the demo base quantised by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from heddle.core.checkpoint import demo
from heddle.core.checkpoint.errors import CheckpointError

from ..quant.write_models import TEXT, put_back, save_float, serves


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny float model, and a text beside it."""
    save_float(tmp_path / "float")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "float"


def quantization_config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return values


def test_every_flag_reaches_the_files(heddle, model, tmp_path):
    result = heddle(
        *[
            "quantize",
            str(model),
            "--method",
            "gptq",
            "--bits",
            "8",
            "--group-size",
            "16",
            "--no-desc-act",
            "--no-sym",
        ],
        *["--damp", "0.05", "--calibration", str(tmp_path / "text.txt"), "--samples", "20"],
        *["--sample-tokens", "64", "-o", str(tmp_path / "out")],
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'out'}: ")
    said = quantization_config(tmp_path / "out")
    assert {key: said[key] for key in ("bits", "group_size", "desc_act", "sym", "damp_percent")} == {
        "bits": 8,
        "group_size": 16,
        "desc_act": False,
        "sym": False,
        "damp_percent": 0.05,
    }


@pytest.mark.parametrize("method", ["int8", "gptq", "awq"])
def test_the_method_alone_is_enough(heddle, tmp_path, method):
    """The packaged text measures; the group size is the largest that fits."""
    reference = save_float(tmp_path / "float")
    result = heddle("quantize", str(tmp_path / "float"), "--method", method, "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert quantization_config(tmp_path / "out").get("group_size", 32) == 32
    serves(tmp_path / "out", put_back(reference, tmp_path / "out", method))


def test_what_the_model_rules_out_is_status_1(heddle, model, tmp_path):
    out = ["-o", str(tmp_path / "out")]
    for args, message in (
        (["nowhere/", "--method", "gptq", *out], "nowhere"),
        ([str(model), "--method", "awq", "--group-size", "64", *out], "group_size 64"),
        ([str(model), "--method", "gptq", "--sample-tokens", "1000000", *out], "sample_tokens 1000000"),
        ([str(model), "--method", "gptq", "-o", str(model)], "exists already"),
    ):
        result = heddle("quantize", *args)
        assert result.exit_code == 1
        assert message in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--method gptq --calibration nothing.txt",
        *[f"--method gptq --bits {bits}" for bits in ("5", "0", "-4", "four")],
        "--method awq --bits 8",
        "--method int8 --bits 4",
        *[f"--method {method} --group-size {size}" for method in ("gptq", "awq") for size in (0, -2, 8, 40)],
        *[f"--method gptq --damp {damp}" for damp in ("0", "1", "-0.1", "nan", "inf")],
        *[f"--method awq --{what} {count}" for what in ("samples", "sample-tokens") for count in (0, -1)],
        "--method awq --desc-act",
        "--method awq --no-sym",
        *[f"--method int8 {more}" for more in ("--group-size 64", "--desc-act", "--no-sym", "--samples 8")],
    ],
)
def test_what_no_model_could_be_quantised_by_is_status_2_and_nothing_is_begun(heddle, tmp_path, flags):
    """No model is looked for: there is none."""
    result = heddle("quantize", "nowhere/", *flags.split(), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert flags.split()[2] in result.output
    assert "nowhere" not in result.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--method", "gptq"], "--output"),
        (["-o", "out"], "--method"),
        (["-o", "out", "--method", "fp4"], "fp4"),
    ],
)
def test_a_known_method_and_an_output_are_asked_for(heddle, args, named):
    result = heddle("quantize", "nowhere/", *args)
    assert result.exit_code == 2
    assert named in result.output


def test_int8_takes_no_calibration(heddle, model, tmp_path):
    text = str(tmp_path / "text.txt")
    result = heddle(
        "quantize", str(model), "--method", "int8", "--calibration", text, "-o", str(tmp_path / "out")
    )
    assert result.exit_code == 2
    assert "--calibration" in result.stderr


def test_a_folder_that_cannot_be_written_is_status_1(heddle, model, tmp_path):
    (tmp_path / "file").write_text("")
    result = heddle("quantize", str(model), "--method", "int8", "-o", str(tmp_path / "file" / "out"))
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


# ---------------------------------------------------------------- the demo base


@pytest.fixture
def demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the demo base's place."""
    save_float(tmp_path / "float")
    monkeypatch.setattr(demo, "demo_base", lambda cache_dir, progress: tmp_path / "float")
    return tmp_path / "float"


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_demo_base_is_quantised_once_with_progress(demo_model, tmp_path, method):
    reports: list[tuple[str, int, int]] = []
    folder = demo.quantized_demo_base(method, tmp_path / "cache", lambda *report: reports.append(report))
    assert folder == tmp_path / "cache" / "v1" / f"{demo.NAME}-{method}"
    assert quantization_config(folder)["quant_method"] == method
    assert [(done, total) for _, done, total in reports] == [(0, 2), (1, 2), (2, 2)]
    again: list[Any] = []
    written = (folder / "config.json").stat().st_mtime_ns
    assert (
        demo.quantized_demo_base(method, tmp_path / "cache", lambda *report: again.append(report)) == folder
    )
    assert (again, (folder / "config.json").stat().st_mtime_ns) == ([], written)


def test_a_failure_says_why_and_leaves_nothing(demo_model, tmp_path):
    (demo_model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"could not be quantised \(gptq\)[^$]*no weights"):
        demo.quantized_demo_base("gptq", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "v1").iterdir() if path.suffix != ".lock"] == []


def test_an_interrupt_ends_the_work(demo_model, tmp_path):
    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.quantized_demo_base("awq", tmp_path / "cache", stop)
    assert [path.name for path in (tmp_path / "cache" / "v1").iterdir() if path.suffix != ".lock"] == []
