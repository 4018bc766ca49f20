"""GPTQ checkpoints as they come in the field, whole models: what other loaders misread, drop or stumble over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heddle.core.model.config import ModelError
from heddle.lora.base import MODULES

from ..model.conftest import Bench, load, save_tiny
from .packers import configure, edit, quantize_model
from .test_gptq_model import SETTINGS, TOKENS, agrees

PROJECTIONS = [f"{'mlp' if i > 3 else 'self_attn'}.{module}" for i, module in enumerate(MODULES)]


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(folder: Path, **how: Any) -> Any:
    return quantize_model(save_tiny(folder), folder, "gptq", **how)


def logits(folder: Path, backend: str) -> torch.Tensor:
    return Bench(load(folder, backend)).step({"a": TOKENS})["a"]


def test_fused_projections_are_cut_by_the_heads_they_have(tmp_path: Path) -> None:
    """q has 32 outputs, k and v 16 each: not three equal parts."""
    reference = save(tmp_path)
    for index, layer in enumerate(load(tmp_path).layers):
        assert layer.qkv.offsets == (0, 32, 48, 64)
        attention = reference.model.layers[index].self_attn
        for first, last, member in zip((0, 32, 48), (32, 48, 64), ("q_proj", "k_proj", "v_proj")):
            expected = getattr(attention, member).weight.detach()
            assert torch.equal(layer.qkv.linear.dequantize()[first:last], expected)


def test_no_biases_and_zero_biases_for_every_projection_give_the_same_bits(
    tmp_path: Path, backend: str
) -> None:
    reference = save(tmp_path / "without")
    save(tmp_path / "zeros", zero_biases=True)
    without = logits(tmp_path / "without", backend)
    assert torch.equal(without, logits(tmp_path / "zeros", backend))
    agrees(load(tmp_path / "without", backend), reference)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_bias_beyond_what_the_config_says_is_refused_and_not_dropped(
    tmp_path: Path, projection: str
) -> None:
    save(tmp_path, zero_biases=True)
    name = f"model.layers.1.{projection}.bias"
    edit(tmp_path, lambda tensors: tensors[name][3:4].fill_(0.25))
    with pytest.raises(ModelError, match=rf"{name} is not zero"):
        load(tmp_path)


@pytest.mark.parametrize("desc_act", [False, True])
def test_one_group_a_row_is_read_whichever_order_the_settings_name(
    tmp_path: Path, backend: str, desc_act: bool
) -> None:
    """group_size -1: scales [1, N], qzeros [1, N / 8], g_idx of zeros."""
    reference = save(tmp_path, group_size=-1, settings={**SETTINGS, "group_size": -1, "desc_act": desc_act})
    agrees(load(tmp_path, backend), reference)


def test_a_group_longer_than_a_row_is_the_row(tmp_path: Path, backend: str) -> None:
    """128 over 32 and 64 inputs."""
    reference = save(tmp_path, group_size=-1, settings={**SETTINGS, "group_size": 128})
    agrees(load(tmp_path, backend), reference)


@pytest.mark.parametrize(("bits", "rows", "zeros"), [(2, 2, 2), (3, 3, 3)])
def test_bits_that_are_not_served_are_refused_before_any_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, rows: int, zeros: int
) -> None:
    """Also where the tensors have the right sizes: K * bits / 32 words, whether or not codes straddle them."""
    save(tmp_path)

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("qweight")]:
            k, n = tensors[name].shape[0] * 8, tensors[name].shape[1]
            tensors[name] = torch.zeros(k * bits // 32, n, dtype=torch.int32)
            groups = tensors[name.replace("qweight", "qzeros")].shape[0]
            tensors[name.replace("qweight", "qzeros")] = torch.zeros(
                groups, n * bits // 32, dtype=torch.int32
            )

    edit(tmp_path, pack)
    configure(tmp_path, quantization_config={**SETTINGS, "bits": bits})
    monkeypatch.setattr("heddle.core.model.weights.Checkpoint.read", _must_not_be_called)
    with pytest.raises(ModelError, match=rf"bits {bits} is not supported for GPTQ, only 4 and 8"):
        load(tmp_path)


def _must_not_be_called(*_: Any) -> None:
    raise AssertionError("a tensor was read")


@pytest.mark.parametrize(
    "dynamic",
    [
        {"-:.*o_proj": {}},
        {"+:.*layers\\.1\\..*": {"bits": 8, "group_size": 32}},
        {"-:.*o_proj": {}, "+:.*layers\\.1\\..*": {"bits": 8, "group_size": 32}},
    ],
)
def test_settings_for_single_modules_are_refused_by_name(tmp_path: Path, dynamic: dict[str, Any]) -> None:
    """With o_proj in float, as the settings say."""
    save(tmp_path, skip=("o_proj",), settings={**SETTINGS, "dynamic": dynamic})
    with pytest.raises(ModelError, match=r"config\.json: dynamic .* is not supported"):
        load(tmp_path)


def test_o_proj_in_float_without_a_setting_that_says_so_is_refused(tmp_path: Path) -> None:
    save(tmp_path, skip=("o_proj",), settings=SETTINGS)
    with pytest.raises(ModelError, match=r"o_proj\.weight is torch\.float32, but .*GPTQ"):
        load(tmp_path)


@pytest.mark.parametrize("layout", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "v1", "v2"), [(4, 0x77777777, 0x88888888), (8, 0x7F7F7F7F, 0x80808080)])
def test_zeros_one_off_never_pass_in_silence(
    tmp_path: Path, layout: str | None, bits: int, v1: int, v2: int
) -> None:
    """Symmetric, zeros all alike: right under the format they are of, refused with its name under the other."""
    reference = save(tmp_path, bits=bits, symmetric=True)
    settings = {**SETTINGS, "bits": bits, "sym": True}
    configure(tmp_path, quantization_config={**settings, **({"checkpoint_format": layout} if layout else {})})
    for stored, meant in ((v1, "gptq"), (v2, "gptq_v2")):
        word = int(np.uint32(stored).view(np.int32))
        edit(tmp_path, lambda tensors, word=word: [
            tensor.fill_(word) for name, tensor in tensors.items() if name.endswith("qzeros")
        ])  # fmt: skip
        if meant == (layout or "gptq"):
            agrees(load(tmp_path), reference)
        else:
            with pytest.raises(ModelError, match=rf"sym is true.*would be under checkpoint_format '{meant}'"):
                load(tmp_path)
