"""Layers that AutoGPTQ, AutoAWQ and bitsandbytes quantised, packed and computed: read to the same weights.

`make judges` writes the files in `golden/`; their metadata says what made each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from heddle.kernels.ops import for_device
from heddle.quant.base import LinearForm, LinearMethod, LinearSpec, Target
from heddle.quant.detect import detect
from heddle.quant.int8 import quantize_rows
from safetensors import safe_open
from safetensors.torch import load_file

from ..kernels import interpreted

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "golden").glob("*.safetensors"))}


@dataclass(frozen=True)
class Backend:
    """Kernels, what they compute in, and how far from exact products they may be, relative to the largest."""

    name: str
    device: str
    dtype: torch.dtype
    tolerance: float

    def target(self) -> Target:
        return Target(for_device(self.device, self.name), self.dtype, torch.device(self.device))


REFERENCE = Backend("reference", "cpu", torch.float32, 1e-5)
BACKENDS = [
    REFERENCE,
    Backend("cpu", "cpu", torch.float32, 1e-5),
    Backend("triton", "cpu", torch.float32, 1e-5),
    Backend("triton", "cpu", torch.float16, 2e-3),
]
"""Triton's kernels run under its interpreter."""

interpreted.set_right()


@dataclass(frozen=True)
class Golden:
    """One file: what the tool stored, and what it computed with that."""

    about: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def members(self) -> list[str]:
        return [name.removesuffix(".y") for name in self.tensors if name.endswith(".y")]

    def weight(self, member: str) -> torch.Tensor:
        """As the tool multiplies with it, in its own dtype [N, K]."""
        return self.tensors.get(f"{member}.dequantised", self.tensors[f"{member}.weight"])

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint."""
        ours = (".y", ".float", ".dequantised", *([".weight"] if self.packed else []))
        return {name: t for name, t in self.tensors.items() if name != "x" and not name.endswith(ours)}

    @property
    def packed(self) -> bool:
        return self.about["settings"]["quant_method"] != "bitsandbytes"

    def specs(self) -> list[LinearSpec]:
        stored = self.stored()
        return [
            LinearSpec(member, *self.weight(member).shape, bias=_any(stored.get(f"{member}.bias")))
            for member in self.members
        ]

    def form(self) -> LinearForm:
        """What the settings and the tensors choose, as for a whole checkpoint."""
        named = {f"model.layers.0.{name}": tensor.dtype for name, tensor in self.stored().items()}
        named = {name.replace("linear.", "o_proj."): dtype for name, dtype in named.items()}
        return detect("auto", self.about["settings"], named).main

    # a checkpoint's tensors, as forms read them
    def dtype(self, name: str) -> torch.dtype | None:
        found = self.stored().get(name)
        return None if found is None else found.dtype

    def read(self, name: str) -> torch.Tensor:
        return self.stored()[name]


def _any(bias: torch.Tensor | None) -> bool:
    """AutoGPTQ and AutoAWQ keep a bias for a linear that has none too; a model's configuration decides."""
    return bias is not None and bool(bias.any())


def opened(name: str) -> Golden:
    with safe_open(FILES[name], framework="pt") as file:
        return Golden(json.loads(file.metadata()["about"]), load_file(FILES[name]))


@pytest.fixture(params=FILES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return opened(request.param)


@pytest.fixture(params=BACKENDS, ids=lambda backend: f"{backend.name} {backend.dtype}")
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


def load(golden: Golden, backend: Backend = REFERENCE) -> LinearMethod:
    """All members of a file as one linear, after the check a whole checkpoint gets."""
    form, specs = golden.form(), golden.specs()
    stored = golden.stored()
    for spec in specs:
        for name, asked in form.expected(spec, golden).items():
            assert tuple(stored[name].shape) == asked.shape
            assert stored[name].dtype in asked.dtypes
    return form.from_checkpoint(golden, specs, backend.target())


def product(golden: Golden, backend: Backend) -> torch.Tensor:
    """What the backend computes for the file's input: float64 [T, N]."""
    x = golden.tensors["x"].to(backend.device, backend.dtype)
    return load(golden, backend).apply(x).cpu().double()


def test_there_are_layers_of_every_tool() -> None:
    found = [name.split("-")[0] for name in FILES]
    assert {kind: found.count(kind) for kind in ("gptq", "awq", "int8")} == {"gptq": 19, "awq": 7, "int8": 3}


def test_dequantised_weights_equal_the_tools(golden: Golden) -> None:
    """Equal in float32; where the tool computes in float16, equal to ours rounded once to float16."""
    expected = torch.cat([golden.weight(member) for member in golden.members])
    assert torch.equal(load(golden).dequantize().to(expected.dtype), expected)


def test_the_product_is_x_times_the_tools_weights(golden: Golden, backend: Backend) -> None:
    weights = torch.cat([golden.weight(member) for member in golden.members])
    if weights.dtype != torch.float32:
        weights = load(golden).dequantize()  # which rounds to the tool's, as tested above
    bias = [golden.tensors.get(f"{m}.bias", torch.zeros(len(golden.weight(m)))) for m in golden.members]
    expected = golden.tensors["x"].double() @ weights.double().T + torch.cat(bias).double()
    assert (product(golden, backend) - expected).abs().max() <= backend.tolerance * expected.abs().max()


def test_the_product_is_the_tools_own(golden: Golden, backend: Backend) -> None:
    """To the precision the tool computes in: float32, float16, or INT8's with its inputs rounded too."""
    tolerance = 1e-5 if golden.weight(golden.members[0]).dtype == torch.float32 else 2e-3
    if not golden.packed:
        tolerance = 2e-2
    expected = torch.cat([golden.tensors[f"{member}.y"] for member in golden.members], dim=1).double()
    error = (product(golden, backend) - expected).abs().max()
    assert error <= max(tolerance, backend.tolerance) * expected.abs().max()


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("int8")])
def test_float_weights_become_the_integers_of_bitsandbytes(name: str) -> None:
    golden = opened(name)
    for member in golden.members:
        codes, absmax = quantize_rows(golden.tensors[f"{member}.float"])
        assert torch.equal(codes, golden.tensors[f"{member}.weight"])
        assert torch.equal(absmax, golden.tensors[f"{member}.SCB"])


def test_a_file_of_awqs_without_zeros_means_the_middle() -> None:
    """The same layer as with its zeros of 8 stored."""
    golden = opened("awq-g32-without-zero-points")
    del golden.tensors["linear.qzeros"]
    assert torch.equal(load(golden).dequantize().half(), golden.weight("linear"))
