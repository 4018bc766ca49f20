"""Single AWQ linears in the gemm layout: order of nibbles, zeros as stored; other versions are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heddle.kernels.ops import for_device
from heddle.quant.awq import AwqForm
from heddle.quant.base import LinearMethod, LinearSpec, QuantError, Target
from heddle.quant.packed import PackedLinear
from heddle.quant.settings import PackedSettings, parse
from safetensors.torch import load_file

from .packers import SHARED, Packed, Tensors, awq


def settings(**changes: Any) -> PackedSettings:
    values = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", **changes}
    return parse({key: value for key, value in values.items() if value is not None}, "config.json")


def made(
    n: int = 32, k: int = 64, group_size: int = 16, zero: int | None = None, scale_dtype: Any = np.float16
) -> Packed:
    random = np.random.default_rng(n + k)
    groups = k // group_size
    zeros = random.integers(0, 16, (groups, n)) if zero is None else np.full((groups, n), zero)
    scales = (10.0 ** random.uniform(-3, -1, (groups, n))).astype(scale_dtype)
    return awq(random.integers(0, 16, (n, k)), zeros, scales, group_size)


def read(packed: Packed, how: PackedSettings, backend: str = "reference", **changes: Any) -> LinearMethod:
    n, k = packed.weight.shape
    tensors = {**packed.tensors, **changes}
    reader = Tensors("p", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    spec = LinearSpec("p", n, k, bias=False)
    form = AwqForm(how)
    asked = form.expected(spec, reader)
    assert set(reader.tensors) == set(asked)
    for name, tensor in reader.tensors.items():
        assert (tuple(tensor.shape), tensor.dtype in asked[name].dtypes) == (asked[name].shape, True)
    return form.from_checkpoint(
        reader, [spec], Target(for_device("cpu", backend), torch.float32, torch.device("cpu"))
    )


def test_columns_0_to_7_are_the_nibbles_of_0x75316420() -> None:
    """In GPTQ's order the same word would be 0, 2, 4, 6, 1, 3, 5, 7."""
    word = int(np.uint32(0x75316420).view(np.int32))
    tensors = {
        "qweight": torch.full((16, 1), word, dtype=torch.int32),
        "qzeros": torch.zeros((1, 1), dtype=torch.int32),
        "scales": torch.ones((1, 8)),
    }
    linear = read(Packed(tensors, torch.empty(8, 16)), settings())
    assert torch.equal(linear.dequantize(), torch.arange(8.0).unsqueeze(1).repeat(1, 16))


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("group_size", [-1, 16, 32, 64])
def test_weights_are_exactly_what_the_format_says(group_size: int, scale_dtype: Any) -> None:
    packed = made(group_size=64 if group_size == -1 else group_size, scale_dtype=scale_dtype)
    linear = read(packed, settings(group_size=group_size))
    assert isinstance(linear, PackedLinear)
    assert torch.equal(linear.dequantize(), packed.weight)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_product_is_that_of_the_dequantised_weights(backend: str) -> None:
    packed = made(40, 96)
    x = torch.randn((5, 96), generator=torch.Generator().manual_seed(0))
    expected = x.double() @ packed.weight.double().T
    error = (read(packed, settings(), backend).apply(x) - expected).abs().max() / expected.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("zero", [0, 15])
def test_zeros_of_0_and_15_stay_0_and_15(zero: int) -> None:
    packed = made(zero=zero)
    weight = read(packed, settings()).dequantize()
    assert torch.equal(weight, packed.weight)
    assert bool((weight >= 0).all() if zero == 0 else (weight <= 0).all())


class TestWithoutZeroPoints:
    def test_a_file_that_stores_none_has_the_middle(self) -> None:
        packed = made(zero=8)
        linear = read(packed, settings(zero_point=False), qzeros=None)
        assert torch.equal(linear.dequantize(), packed.weight)

    def test_stored_ones_may_only_say_the_same(self) -> None:
        packed = made(zero=8)
        assert torch.equal(read(packed, settings(zero_point=False)).dequantize(), packed.weight)
        with pytest.raises(QuantError, match=r"p\.qzeros is not 8 throughout, but zero_point is false"):
            read(made(zero=7), settings(zero_point=False))

    def test_they_are_asked_for_where_the_settings_have_them(self) -> None:
        spec = LinearSpec("p", 32, 64, bias=False)
        for said in (True, None):
            asked = AwqForm(settings(zero_point=said)).expected(spec, Tensors("p", {}))
            assert asked["p.qzeros"].shape == (4, 4)


@pytest.mark.parametrize("version", ["gemm", "GEMM", None])
def test_gemm_is_read_and_is_what_no_version_means(version: str | None) -> None:
    packed = made()
    assert torch.equal(read(packed, settings(version=version)).dequantize(), packed.weight)


@pytest.mark.parametrize("version", ["gemv", "GEMV", "marlin", "gemv_fast", "exllama", 2])
def test_other_versions_are_refused_by_name(version: Any) -> None:
    with pytest.raises(QuantError, match=rf"AWQ version '?{version}'? is not supported"):
        settings(version=version)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 8}, "bits 8"),
        ({"bits": 3}, "bits 3"),
        ({"group_size": 0}, "group_size 0"),
        ({"zero_point": "no"}, "zero_point"),
        ({"modules_to_not_convert": "o_proj"}, "modules_to_not_convert"),
    ],
)
def test_settings_that_cannot_be_read_exactly_are_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(QuantError, match=rf"^config\.json: .*{named}"):
        settings(**changes)


def test_groups_that_do_not_divide_the_inputs_are_refused() -> None:
    with pytest.raises(QuantError, match="groups of 48 do not divide"):
        AwqForm(settings(group_size=48)).expected(LinearSpec("p", 32, 64, bias=False), Tensors("p", {}))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_layer_of_autoawqs_own_gives_its_weights_and_outputs(backend: str) -> None:
    path = SHARED / "autoawq_gemm_g64_k_proj.safetensors"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here; HEDDLE_CHECKPOINTS names the folder of such layers")
    stored = load_file(path)
    packed = Packed({key: stored[key] for key in ("qweight", "qzeros", "scales")}, stored["weight"])
    linear = read(packed, settings(group_size=64), backend)
    # The tool multiplies in float16, so its weights are ours rounded once.
    assert torch.equal(linear.dequantize().half().float(), stored["weight"].half().float())
    error = (linear.apply(stored["x"]) - stored["y"]).abs().max() / stored["y"].abs().max()
    assert error < 2e-3
    own = stored["x"].double() @ linear.dequantize().double().T
    assert (linear.apply(stored["x"]) - own).abs().max() / own.abs().max() < 1e-5
