"""Single GPTQ linears: codes, zeros, groups and orders as the format has them; what is none is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heddle.kernels.ops import for_device
from heddle.quant.base import LinearMethod, LinearSpec, QuantError, Target
from heddle.quant.gptq import GptqForm
from heddle.quant.packed import PackedLinear
from heddle.quant.settings import PackedSettings, parse
from heddle.quant.side_by_side import SideBySide
from safetensors.torch import load_file

from .packers import SHARED, Packed, Tensors, gptq, spread


def target(backend: str = "reference") -> Target:
    return Target(for_device("cpu", backend), torch.float32, torch.device("cpu"))


def settings(**changes: Any) -> PackedSettings:
    values = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, **changes}
    return parse({key: value for key, value in values.items() if value is not None}, "config.json")


def made(
    n: int = 32,
    k: int = 64,
    *,
    bits: int = 4,
    group_size: int = 16,
    seed: int | None = None,
    zero: int | None = None,
    v2: bool = False,
    scale_dtype: Any = np.float32,
) -> Packed:
    """A linear of random codes; zeros random, or all `zero`."""
    random = np.random.default_rng(k + bits)
    g_idx = spread(k, group_size, seed)
    groups = g_idx.max() + 1
    codes = random.integers(0, 2**bits, (n, k))
    zeros = random.integers(0, 2**bits, (groups, n)) if zero is None else np.full((groups, n), zero)
    scales = (10.0 ** random.uniform(-3, -1, (groups, n))).astype(scale_dtype)
    return gptq(codes, zeros, scales, g_idx, bits, v2=v2)


def read(packed: Packed, how: PackedSettings, backend: str = "reference", **changes: Any) -> LinearMethod:
    n, k = packed.weight.shape
    tensors = {**packed.tensors, **changes}
    reader = Tensors("p", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    spec = LinearSpec("p", n, k, bias=False)
    form = GptqForm(how)
    asked = form.expected(spec, reader)
    assert set(reader.tensors) <= set(asked)
    for name, tensor in reader.tensors.items():
        assert (tuple(tensor.shape), tensor.dtype in asked[name].dtypes) == (asked[name].shape, True)
    return form.from_checkpoint(reader, [spec], target(backend))


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("group_size", [-1, 16, 32, 48, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_exactly_what_the_format_says(
    bits: int, group_size: int, seed: int | None, scale_dtype: Any
) -> None:
    """Group sizes that do not divide K leave a short last group; one beyond K is one group."""
    packed = made(bits=bits, group_size=group_size, seed=seed, scale_dtype=scale_dtype)
    linear = read(packed, settings(bits=bits, group_size=group_size, desc_act=seed is not None))
    assert torch.equal(linear.dequantize(), packed.weight)
    per_weight = linear.weight_bytes / packed.weight.numel()
    assert per_weight <= bits / 8 + 5 * 4 / 64 + (8 / 32 if seed else 0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_product_is_that_of_the_dequantised_weights(bits: int, backend: str) -> None:
    packed = made(40, 96, bits=bits, seed=1)
    linear = read(packed, settings(bits=bits, desc_act=True), backend)
    x = torch.randn((5, 96), generator=torch.Generator().manual_seed(0))
    expected = x.double() @ packed.weight.double().T
    error = (linear.apply(x) - expected).abs().max() / expected.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize(("bits", "v1", "v2"), [(4, 0x77777777, 0x88888888), (8, 0x7F7F7F7F, 0x80808080)])
def test_zeros_are_stored_less_one_in_the_first_format_and_as_they_are_in_the_second(
    bits: int, v1: int, v2: int
) -> None:
    packed = made(bits=bits, zero=2 ** (bits - 1))
    for word, layout in ((v1, None), (v1, "gptq"), (v2, "gptq_v2")):
        words = torch.from_numpy(np.full((4, 32 * bits // 32), word, np.uint32).view(np.int32))
        for symmetric in (True, False, None):
            how = settings(bits=bits, checkpoint_format=layout, sym=symmetric)
            assert torch.equal(read(packed, how, qzeros=words).dequantize(), packed.weight)


def test_a_zero_of_0_is_stored_as_15_in_the_first_format() -> None:
    packed = made(zero=0)
    assert int(packed.tensors["qzeros"][0, 0]) == -1
    assert torch.equal(read(packed, settings()).dequantize(), packed.weight)


@pytest.mark.parametrize(("layout", "v2", "hint"), [("gptq", True, "gptq_v2"), ("gptq_v2", False, "gptq")])
def test_symmetric_zeros_that_miss_the_middle_are_refused_with_the_format_they_fit(
    layout: str, v2: bool, hint: str
) -> None:
    packed = made(zero=8, v2=v2)
    how = settings(sym=True, checkpoint_format=layout)
    with pytest.raises(
        QuantError, match=rf"p\.qzeros: sym is true.*would be under checkpoint_format '{hint}'"
    ):
        read(packed, how)
    with pytest.raises(QuantError, match=r"not all 8$"):
        read(made(zero=5), settings(sym=True))


def test_each_row_takes_the_scale_of_its_own_group_in_act_order() -> None:
    random = np.random.default_rng(0)
    codes, g_idx = random.integers(0, 16, (16, 32)), np.arange(32) % 2
    scales = np.stack([np.full(16, 1e-3), np.full(16, 1e-1)]).astype(np.float32)
    packed = gptq(codes, np.full((2, 16), 8), scales, g_idx, 4)
    linear = read(packed, settings(desc_act=True))
    for i in range(32):
        expected = torch.tensor(codes[:, i] - 8) * torch.tensor(scales[i % 2])
        assert torch.equal(linear.dequantize()[:, i], expected)
    assert torch.equal(read(packed, settings(desc_act=None)).dequantize(), packed.weight)


class TestGroupsOfRows:
    """`g_idx` in all the ways it is there, is not there, or makes no sense."""

    def test_a_file_without_it_has_its_rows_in_order(self) -> None:
        packed = made()
        assert torch.equal(read(packed, settings(), g_idx=None).dequantize(), packed.weight)
        assert torch.equal(read(packed, settings(desc_act=None), g_idx=None).dequantize(), packed.weight)

    def test_zeros_are_a_placeholder_without_act_order(self) -> None:
        packed = made()
        nothing = torch.zeros(64, dtype=torch.int32)
        for desc_act in (False, None):
            how = settings(desc_act=desc_act)
            assert torch.equal(read(packed, how, g_idx=nothing).dequantize(), packed.weight)

    def test_zeros_are_the_only_group_when_there_is_one(self) -> None:
        packed = made(group_size=-1)
        assert not packed.tensors["g_idx"].any()
        for desc_act in (False, True):
            how = settings(group_size=-1, desc_act=desc_act)
            assert torch.equal(read(packed, how).dequantize(), packed.weight)
            assert torch.equal(read(packed, how, g_idx=None).dequantize(), packed.weight)

    def test_act_order_without_it_is_missing_a_tensor(self) -> None:
        spec = LinearSpec("p", 32, 64, bias=False)
        asked = GptqForm(settings(desc_act=True)).expected(spec, Tensors("p", {}))
        assert asked["p.g_idx"].shape == (64,)

    @pytest.mark.parametrize(
        ("index", "named"),
        [
            (np.zeros(64), "does not fill groups of 16"),
            (np.arange(64) // 16 + 1, "groups from 1 to 4, but there are 4"),
            (np.arange(64) // 16 - 1, "groups from -1 to 2"),
            (np.where(np.arange(64) < 3, 3, np.arange(64) // 16), "does not fill groups"),
        ],
    )
    def test_what_is_no_order_of_groups_is_refused(self, index: np.ndarray, named: str) -> None:
        with pytest.raises(QuantError, match=rf"p\.g_idx.*{named}"):
            read(made(), settings(desc_act=True), g_idx=torch.from_numpy(index.astype(np.int32)))

    def test_an_order_that_the_settings_deny_is_refused(self) -> None:
        with pytest.raises(QuantError, match=r"p\.g_idx.*desc_act is false in config\.json"):
            read(made(seed=2), settings(desc_act=False))


class TestSideBySide:
    """Linears of one input: one matrix where they are in one order of features."""

    def load(self, seeds: tuple[int | None, ...], backend: str = "cpu") -> tuple[LinearMethod, torch.Tensor]:
        members = [made(n, seed=seed) for n, seed in zip((32, 16, 16), seeds)]
        tensors = {f"{i}.{part}": t for i, m in enumerate(members) for part, t in m.tensors.items()}
        specs = [LinearSpec(f"p.{i}", len(m.weight), 64, bias=False) for i, m in enumerate(members)]
        form = GptqForm(settings(desc_act=True))
        linear = form.from_checkpoint(Tensors("p", tensors), specs, target(backend))
        return linear, torch.cat([member.weight for member in members])

    @pytest.mark.parametrize("seeds", [(None, None, None), (1, 1, 1)])
    def test_members_in_one_order_become_one_matrix(self, seeds: tuple[int | None, ...]) -> None:
        linear, expected = self.load(seeds)
        assert isinstance(linear, PackedLinear)
        assert torch.equal(linear.dequantize(), expected)

    @pytest.mark.parametrize(("seeds", "parts"), [((1, 2, 3), 3), ((1, 1, 2), 2), ((None, 1, None), 3)])
    def test_members_in_orders_of_their_own_are_not_fused(
        self, seeds: tuple[int | None, ...], parts: int
    ) -> None:
        linear, expected = self.load(seeds)
        assert isinstance(linear, SideBySide)
        assert len(linear.parts) == parts
        assert torch.equal(linear.dequantize(), expected)
        x = torch.randn((3, 64), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(linear.apply(x), x @ expected.T, rtol=1e-4, atol=1e-4)


class TestBiases:
    def test_zeros_for_a_linear_without_one_change_nothing(self) -> None:
        packed = made()
        linear = read(packed, settings(), bias=torch.zeros(32, dtype=torch.float16))
        x = torch.randn(2, 64)
        assert torch.equal(linear.apply(x), read(packed, settings()).apply(x))
        assert torch.equal(linear.dequantize(), packed.weight)

    def test_one_that_the_config_denies_is_refused_by_name(self) -> None:
        bias = torch.zeros(32)
        bias[5] = 1e-3
        with pytest.raises(QuantError, match=r"p\.bias is not zero"):
            read(made(), settings(), bias=bias)

    @pytest.mark.parametrize("backend", ["reference", "cpu"])
    def test_one_that_the_config_promises_is_added(self, backend: str) -> None:
        packed = made()
        reader = Tensors("p", {**packed.tensors, "bias": torch.arange(32.0)})
        spec = LinearSpec("p", 32, 64, bias=True)
        linear = GptqForm(settings()).from_checkpoint(reader, [spec], target(backend))
        assert torch.equal(linear.apply(torch.zeros(2, 64)), torch.arange(32.0).repeat(2, 1))


def test_scales_that_are_not_finite_are_refused() -> None:
    packed = made()
    packed.tensors["scales"][1, 3] = float("nan")
    with pytest.raises(QuantError, match=r"p\.scales"):
        read(packed, settings())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 2}, "bits 2 is not supported"),
        ({"bits": 3}, "bits 3 is not supported"),
        ({"bits": None}, "bits None"),
        ({"bits": True}, "bits True"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": -2}, "group_size -2"),
        ({"group_size": 8}, "group_size 8"),
        ({"group_size": None}, "group_size None"),
        ({"dynamic": {"-:.*o_proj": {}, "+:.*layers\\.1\\..*": {"bits": 8}}}, "dynamic"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({"desc_act": "yes"}, "desc_act"),
        ({"modules_in_block_to_quantize": "q_proj"}, "modules_in_block_to_quantize"),
    ],
)
def test_settings_that_cannot_be_read_exactly_are_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(QuantError, match=rf"^config\.json: .*{named}"):
        settings(**changes)


def test_shapes_that_do_not_fill_words_are_refused() -> None:
    for n, k in ((12, 32), (32, 24)):
        with pytest.raises(QuantError, match=rf"p has {k} inputs and {n} outputs"):
            GptqForm(settings()).expected(LinearSpec("p", n, k, bias=False), Tensors("p", {}))


def golden(name: str, **how: Any) -> tuple[dict[str, torch.Tensor], PackedSettings]:
    path = SHARED / f"autogptq_{name}_k_proj.safetensors"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here; HEDDLE_CHECKPOINTS names the folder of such layers")
    return load_file(path), settings(group_size=64, sym=True, **how)


def golden_linear(stored: dict[str, torch.Tensor], how: PackedSettings, backend: str) -> LinearMethod:
    reader = Tensors("p", {key: stored[key] for key in ("qweight", "qzeros", "scales", "g_idx", "bias")})
    spec = LinearSpec("p", *stored["weight"].shape, bias=False)
    return GptqForm(how).from_checkpoint(reader, [spec], target(backend))


def within(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_layer_of_autogptqs_own_gives_its_weights_and_outputs(backend: str) -> None:
    stored, how = golden("gptq-g64")
    linear = golden_linear(stored, how, backend)
    # The tool's scales were float32, those in the file are rounded to float16: by 2^-11 of each value.
    difference = (linear.dequantize() - stored["weight"]).abs()
    assert (difference <= stored["weight"].abs() * 2**-11 * 1.001 + 1e-8).all()
    within(linear.apply(stored["x"]), stored["y"], 1e-3)
    within(linear.apply(stored["x"]), stored["x"].double() @ linear.dequantize().double().T, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_layer_of_autogptqs_own_in_act_order_is_read_by_its_g_idx(backend: str) -> None:
    """The outputs beside it are of no use: the tool's plain kernel, which made them, passes over g_idx.

    That shows below: they come from groups by position, which are not those the codes were made for.
    """
    stored, how = golden("gptq-g64-act", desc_act=True)
    n, k = stored["weight"].shape
    words = stored["qweight"].numpy().view(np.uint32)
    codes = np.zeros((n, k), np.int64)
    for i in range(k):
        codes[:, i] = words[i // 8] >> (i % 8 * 4) & 15
    scales = stored["scales"].float().numpy()
    by_index = (codes - 8) * scales[stored["g_idx"].numpy()].T
    by_position = (codes - 8) * scales[np.arange(k) // 64].T
    within(torch.from_numpy(by_position).float(), stored["weight"], 1e-3)
    assert np.abs(by_index - by_position).max() > 1
    linear = golden_linear(stored, how, backend)
    assert torch.equal(linear.dequantize(), torch.from_numpy(by_index).float())
    within(linear.apply(stored["x"]), stored["x"].double() @ torch.from_numpy(by_index).T, 1e-5)
