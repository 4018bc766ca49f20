"""Hostile and broken safetensors headers; sound files as the safetensors package itself writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heddle.lora.errors import AdapterInvalid
from heddle.lora.safetensors_file import SafetensorsFile
from safetensors.torch import save_file


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(AdapterInvalid) as error:
        SafetensorsFile(path, **options)
    return str(error.value)


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).half(),
        "c": torch.randn(2, 2).bfloat16(),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert np.array_equal(file.read("a"), tensors["a"].numpy())
        assert np.array_equal(file.read("b"), tensors["b"].numpy())
        assert np.array_equal(file.read("c"), tensors["c"].view(torch.uint16).numpy())
        assert file.read("empty").shape == (0, 4)
        assert b"".join(bytes(piece) for piece in file.chunks("a", 7)) == tensors["a"].numpy().tobytes()


def test_a_header_of_eight_exabytes_is_refused_before_any_allocation(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    assert "claims a header of 9223372036854775808 bytes" in refusal(path)


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((1000).to_bytes(8, "little") + b"{}")
    assert "cut off" in refusal(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[:-1])
    assert "cut off" in refusal(tmp_path / "x")
    (tmp_path / "x").write_bytes(whole[:4])
    assert "4 bytes" in refusal(tmp_path / "x")


def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_a_signal(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1 << 16)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        os.truncate(tmp_path / "x", 5000)
        with pytest.raises(AdapterInvalid, match="became shorter"):
            file.read("a")


def test_a_file_above_the_size_limit_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "x")
    assert "limit of 50" in refusal(tmp_path / "x", max_bytes=50)


def test_a_pipe_in_the_files_place_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    assert "not a regular file" in refusal(tmp_path / "x")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        (b'{"a":{},"a":{}}', b"", "names 'a' twice"),
        ({"a": tensor(0, 4, [1]), "b": tensor(2, 6, [1])}, b"123456", "'b' overlaps"),
        ({"a": tensor(0, 4, [1]), "b": tensor(6, 10, [1])}, b"1234567890", "'b' leaves a gap"),
        ({"a": tensor(4, 8, [1])}, b"12345678", "'a' leaves a gap"),
        ({"a": tensor(0, 4, [1])}, b"12345", "bytes that belong to no tensor"),
        ({"a": tensor(0, 8, [1])}, b"12345678", "takes 4 bytes, data_offsets give it 8"),
        ({"a": tensor(8, 4, [1])}, b"12345678", "takes 4 bytes, data_offsets give it -4"),
        ({"a": tensor(0, 4, [-1])}, b"1234", "shape"),
        ({"a": tensor(0, 4, [1.0])}, b"1234", "shape"),  # type: ignore[list-item]
        ({"a": tensor(0, 4, [True])}, b"1234", "shape"),
        ({"a": tensor(0, 4, [1] * 9)}, b"1234", "shape"),
        ({"a": tensor(0, 4, [1 << 62, 1 << 62])}, b"1234", "takes"),
        ({"a": tensor(0, 4, [1], "F99")}, b"1234", "unknown dtype 'F99'"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "must have dtype, shape and data_offsets"),
        ({"a": 5}, b"", "must have dtype, shape and data_offsets"),
        ({"__metadata__": {"format": 1}}, b"", "__metadata__"),
    ],
)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, header: dict[str, Any] | bytes, data: bytes, message: str
) -> None:
    assert message in refusal(write(tmp_path / "x", header, data))
