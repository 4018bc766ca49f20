"""Every accepted variant, written by PEFT itself: the linears, ranks, scales and weights are PEFT's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heddle.lora.base import MODULES
from heddle.lora.canonical import open_adapter, write
from heddle.lora.inspect import inspect
from heddle.lora.tensor_names import module_path
from peft import PeftModel

from .peft_adapters import base_of, lora_layers, make_peft, tiny_llama

QV = ["q_proj", "v_proj"]

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {"r": 8, "lora_alpha": 16, "target_modules": QV}),
    "all linear, kept as full paths": (2, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "a regular expression": (2, {"r": 4, "lora_alpha": 8, "target_modules": r".*\.(q|v)_proj"}),
    "full paths and parts of paths": (
        2,
        {"r": 4, "target_modules": ["model.layers.0.mlp.gate_proj", "layers.1.self_attn.q_proj"]},
    ),
    "default targets": (2, {"r": 4, "lora_alpha": 8}),
    "rank-stabilised with a rank of its own": (
        2,
        {"r": 8, "lora_alpha": 16, "use_rslora": True, "rank_pattern": {"q_proj": 4}, "target_modules": QV},
    ),
    "alpha pattern that matches nothing": (
        12,
        {"r": 8, "lora_alpha": 16, "target_modules": QV, "alpha_pattern": {"^q_proj": 100}},
    ),
    "anchored alpha pattern": (
        12,
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": QV,
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 100},
        },
    ),
    "alpha pattern of a full path": (
        12,
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": QV,
            "alpha_pattern": {"model.layers.0.self_attn.q_proj": 100},
        },
    ),
    "alpha pattern with the prefix of tensor names": (
        12,
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": QV,
            "alpha_pattern": {"base_model.model.model.layers.0.self_attn.q_proj": 100},
        },
    ),
    "both patterns, odd ranks, a fractional alpha": (
        2,
        {
            "r": 5,
            "lora_alpha": 7.5,
            "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"],
            "rank_pattern": {"down_proj": 1, "layers.1.*": 3},
            "alpha_pattern": {r".*\.mlp\..*": 2, "o_proj": 11},
        },
    ),
    "a list of layers": (12, {"r": 2, "target_modules": QV, "layers_to_transform": [0, 11]}),
    "one layer": (12, {"r": 2, "target_modules": QV, "layers_to_transform": 1}),
    "layer zero alone": (12, {"r": 2, "target_modules": QV, "layers_to_transform": 0}),
    "layers with their pattern": (
        12,
        {"r": 2, "target_modules": QV, "layers_to_transform": [3], "layers_pattern": "layers"},
    ),
    "excluded by expression": (12, {"r": 2, "target_modules": QV, "exclude_modules": r".*layers\.11\..*"}),
    "excluded by list": (
        2,
        {"r": 2, "target_modules": "all-linear", "exclude_modules": ["k_proj", "mlp.up_proj"]},
    ),
    "random start": (2, {"r": 2, "target_modules": QV, "init_lora_weights": False}),
    "gaussian start": (2, {"r": 2, "target_modules": QV, "init_lora_weights": "gaussian"}),
    "orthogonal start": (2, {"r": 2, "target_modules": QV, "init_lora_weights": "orthogonal"}),
    "minor components start": (2, {"r": 2, "target_modules": QV, "init_lora_weights": "mica"}),
    "rank 1": (2, {"r": 1, "lora_alpha": 1, "target_modules": ["down_proj"]}),
    "rank above the width": (2, {"r": 40, "target_modules": ["k_proj"]}),
    "bias all on a base without biases": (2, {"r": 2, "target_modules": QV, "bias": "all"}),
    "fan in fan out": (2, {"r": 2, "target_modules": QV, "fan_in_fan_out": True}),
    "dropout and task": (2, {"r": 2, "target_modules": QV, "lora_dropout": 0.3, "task_type": "CAUSAL_LM"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_linears_ranks_scales_and_weights_are_pefts(variant: str, tmp_path: Path) -> None:
    layers, config = VARIANTS[variant]
    make_peft(tiny_llama(layers), config).save_pretrained(tmp_path)
    expected = lora_layers(PeftModel.from_pretrained(tiny_llama(layers), tmp_path))
    spec = inspect(tmp_path, base_of(layers), max_rank=512, max_bytes=1 << 30)
    assert spec.matched == spec.total == 2 * len(expected)
    write(spec, tmp_path, tmp_path / "canonical")
    with open_adapter(tmp_path / "canonical") as adapter:
        assert adapter.digest == spec.digest
        assert {module_path(d.layer, d.module, bare=False) for d in adapter.deltas} == set(expected)
        for delta in adapter.deltas:
            theirs = expected[module_path(delta.layer, delta.module, bare=False)]
            assert delta.rank == theirs.r["default"]
            assert delta.scale == np.float32(theirs.scaling["default"])
            assert np.array_equal(adapter.read(delta, "A"), theirs.lora_A["default"].weight.detach().numpy())
            assert np.array_equal(adapter.read(delta, "B"), theirs.lora_B["default"].weight.detach().numpy())


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"^q_proj": 100}}, {2.0}),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 100}}, {2.0, 12.5}),
        ({"r": 8, "lora_alpha": 16, "use_rslora": True, "rank_pattern": {"q_proj": 4}}, {8.0, 5.65685}),
    ],
)
def test_scales_are_the_published_ones(
    config: dict[str, Any],
    scales: set[float],
    save_adapter: Callable[..., tuple[Path, dict[str, float]]],
) -> None:
    folder, _ = save_adapter(layers=12, target_modules=QV, **config)
    spec = inspect(folder, base_of(12), max_rank=64, max_bytes=1 << 30)
    assert {round(delta.scale, 5) for delta in spec.deltas} == scales


def test_patterns_that_decide_nothing_are_in_the_receipt(
    save_adapter: Callable[..., tuple[Path, dict[str, float]]],
) -> None:
    folder, _ = save_adapter(
        layers=12,
        r=8,
        target_modules=QV,
        alpha_pattern={"^q_proj": 100, "v_proj": 8},
        rank_pattern={"q_proj": 4, "self_attn.q_proj": 2},
    )
    warnings = inspect(folder, base_of(12), max_rank=64, max_bytes=1 << 30).warnings
    assert "alpha_pattern '^q_proj' changes nothing: it matches no adapted module" in warnings
    assert "rank_pattern 'self_attn.q_proj' changes nothing: an earlier entry matches first" in warnings
    assert not any("v_proj" in warning for warning in warnings)


def test_overlapping_alpha_patterns_mean_what_peft_reads_back_and_are_noted(tmp_path: Path) -> None:
    # PEFT sorts the entries when it saves: an adapter may come back with other scales than it was made with.
    pattern = {"layers.1.*": 30, "q_proj": 4, "^model.layers.1.*v_proj": 30}
    make_peft(tiny_llama(2), {"r": 2, "target_modules": QV, "alpha_pattern": pattern}).save_pretrained(
        tmp_path
    )
    expected = lora_layers(PeftModel.from_pretrained(tiny_llama(2), tmp_path))
    spec = inspect(tmp_path, base_of(2), max_rank=64, max_bytes=1 << 30)
    for delta in spec.deltas:
        path = module_path(delta.layer, delta.module, bare=False)
        assert delta.scale == expected[path].scaling["default"]
    assert [w for w in spec.warnings if "alpha_pattern" in w] == [
        "alpha_pattern: several entries match model.layers.1.self_attn.q_proj; as in PEFT the first in the "
        "file counts, and PEFT sorts them when it saves"
    ]


def test_an_adapter_of_the_bare_decoder_is_mapped_and_its_patterns_keep_their_meaning(tmp_path: Path) -> None:
    wrapped = make_peft(
        tiny_llama(2).model,
        {"r": 2, "lora_alpha": 2, "target_modules": QV, "alpha_pattern": {"^layers.0.self_attn.q_proj": 6}},
    )
    wrapped.save_pretrained(tmp_path)
    spec = inspect(tmp_path, base_of(2), max_rank=64, max_bytes=1 << 30)
    assert [(d.layer, MODULES[d.module], d.scale) for d in spec.deltas] == [
        (0, "q_proj", 3.0),
        (0, "v_proj", 1.0),
        (1, "q_proj", 1.0),
        (1, "v_proj", 1.0),
    ]


def test_all_linear_as_a_word_adapts_what_peft_adapts(
    save_adapter: Callable[..., tuple[Path, dict[str, float]]],
) -> None:
    folder, scales = save_adapter(r=2, target_modules="all-linear")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": "all-linear"}))
    spec = inspect(folder, base_of(2), max_rank=64, max_bytes=1 << 30)
    assert len(spec.deltas) == len(scales) == 14
    assert spec.warnings == []
