"""Adapters that are refused, each for its fault by name, and receipts of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from .peft_adapters import AdapterFolder, check, make_peft, refusal, tiny_llama

P = "base_model.model.model.layers.0.self_attn."


def test_the_receipt_says_what_was_understood(qv: AdapterFolder) -> None:
    spec = check(qv)
    assert (spec.matched, spec.total) == (8, 8)
    assert spec.rank == 2
    assert spec.target_modules == ["q_proj", "v_proj"]
    assert spec.dtype == "F32"
    assert spec.size_bytes == sum(value.nbytes for value in qv.tensors.values())
    assert spec.max_abs == max(float(np.abs(value).max()) for value in qv.tensors.values())
    assert spec.warnings == []


# ------------------------------------------------------------------ variants that change the maths


def test_dora_written_by_peft_is_refused_by_name(tmp_path: Path) -> None:
    make_peft(tiny_llama(2), {"r": 2, "target_modules": ["q_proj"], "use_dora": True}).save_pretrained(
        tmp_path
    )
    assert "use_dora: DoRA" in refusal(tmp_path)


def test_magnitudes_without_the_flag_and_the_flag_without_magnitudes_are_refused(qv: AdapterFolder) -> None:
    tensors = qv.tensors
    qv.store(tensors | {f"{P}q_proj.lora_magnitude_vector": np.ones(32, np.float32)})
    assert "lora_magnitude_vector: DoRA" in refusal(qv)
    qv.store(tensors).configure(use_dora=True)
    assert "use_dora" in refusal(qv)


def test_trained_embedding_and_head_are_refused_with_both_names(tmp_path: Path) -> None:
    config = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    make_peft(tiny_llama(2), config).save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert "modules_to_save" in message
    assert "base_model.model.lm_head.weight [64, 32]" in message
    assert "base_model.model.model.embed_tokens.weight [64, 32]" in message


def test_modules_to_save_without_their_tensors_is_refused_and_an_empty_list_accepted(
    qv: AdapterFolder,
) -> None:
    assert "modules_to_save" in refusal(qv.configure(modules_to_save=["lm_head"]))
    for empty in ([], None):
        assert check(qv.configure(modules_to_save=empty)).matched == 8


def test_tensors_of_saved_modules_in_old_spelling_are_refused(qv: AdapterFolder) -> None:
    name = "base_model.model.lm_head.modules_to_save.default.weight"
    assert name in refusal(qv.store(qv.tensors | {name: np.zeros((64, 32), np.float32)}))


def test_lora_on_head_or_embedding_is_refused_by_name(tmp_path: Path) -> None:
    make_peft(tiny_llama(2), {"r": 2, "target_modules": ["q_proj", "lm_head"]}).save_pretrained(
        tmp_path / "head", save_embedding_layers=False
    )
    assert "lm_head.lora_A.weight: LoRA on the embedding or the head" in refusal(tmp_path / "head")
    make_peft(tiny_llama(2), {"r": 2, "target_modules": ["embed_tokens", "lm_head"]}).save_pretrained(
        tmp_path / "both"
    )
    assert "LoRA on the embedding or the head" in refusal(tmp_path / "both")


def test_a_few_trained_token_rows_are_refused(tmp_path: Path, qv: AdapterFolder) -> None:
    config = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 7]}
    make_peft(tiny_llama(2), config).save_pretrained(tmp_path / "tokens")
    assert "trainable_token_indices: trained token rows" in refusal(tmp_path / "tokens")
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    assert f"{name}: trained token rows" in refusal(
        qv.store(qv.tensors | {name: np.zeros((2, 32), np.float32)})
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora'"),
    ],
)
def test_variants_that_peft_writes_and_plain_lora_is_not(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_peft(tiny_llama(2), {"r": 2, "target_modules": ["q_proj"], **config}).save_pretrained(tmp_path)
    assert message in refusal(tmp_path)


def test_a_converted_pissa_adapter_is_a_plain_lora(tmp_path: Path) -> None:
    model = tiny_llama(2)
    wrapped = make_peft(
        model, {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}
    )
    wrapped.peft_config["default"].init_lora_weights = True
    wrapped.save_pretrained(tmp_path / "start")
    wrapped.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    spec = check(tmp_path / "converted")
    assert (spec.rank, {delta.scale for delta in spec.deltas}) == (4, {2.0})


@pytest.mark.parametrize(
    "key",
    [
        "use_qalora", "target_parameters", "arrow_config", "use_bdlora", "kasa_config", "monteclora_config",
        "velora_config", "megatron_config", "brand_new_variant",
    ],
)  # fmt: skip
def test_a_key_that_is_on_and_not_served_is_refused_by_name(key: str, qv: AdapterFolder) -> None:
    assert key in refusal(qv.configure(**{key: {"k": 1}}))
    assert key in refusal(qv.configure(**{key: True}))
    for off in (None, False, {}, [], ""):
        assert check(qv.configure(**{key: off})).matched == 8


def test_a_newer_pefts_config_loads(qv: AdapterFolder) -> None:
    qv.configure(corda_config=None, eva_config=None, arrow_config=None, peft_version="9.9", new_thing=None)
    assert check(qv).warnings == []


@pytest.mark.parametrize("kind", ["ADALORA", "LOHA", "IA3", None])
def test_another_peft_type_is_refused(kind: str | None, qv: AdapterFolder) -> None:
    assert "peft_type" in refusal(qv.configure(peft_type=kind))


def test_trained_biases_are_refused_by_name(qv: AdapterFolder) -> None:
    name = f"{P}q_proj.base_layer.bias"
    qv.configure(bias="all").store(qv.tensors | {name: np.zeros(32, np.float32)})
    assert f"{name}: trained biases" in refusal(qv)
    assert "bias" in refusal(qv.configure(bias="some"))


# ------------------------------------------------------------------ names


def test_no_tensor_matches_and_both_sides_are_shown(qv: AdapterFolder) -> None:
    message = refusal(qv.rename(lambda name: name.replace("model.layers", "model.language_model.layers")))
    assert "0 of 8 tensors matched" in message
    assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in message
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in message


def test_one_tensor_that_is_not_understood_refuses_the_whole(qv: AdapterFolder) -> None:
    message = refusal(qv.store(qv.tensors | {f"{P}rotary.lora_A.weight": np.zeros((2, 32), np.float32)}))
    assert "8 of 9 tensors matched" in message
    assert "rotary" in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", "model."),
        ("base_model.model.model.", ""),
        (".weight", ".default.weight"),
    ],
)
def test_every_spelling_of_one_rule_means_the_same_adapter(old: str, new: str, qv: AdapterFolder) -> None:
    expected = check(qv)
    spec = check(qv.rename(lambda name: name.replace(old, new)))
    assert spec.digest == expected.digest
    assert spec.deltas == expected.deltas
    assert (spec.matched, spec.total) == (8, 8)


def test_one_tensor_in_two_spellings_is_refused_as_twice_the_same(qv: AdapterFolder) -> None:
    name = f"{P}q_proj.lora_A.weight"
    tensors = qv.tensors
    for other in (
        name.replace(".weight", ".default.weight"),
        name.replace("model.model.model", "model.model"),
    ):
        assert "the same tensor twice" in refusal(qv.store(tensors | {other: tensors[name]}))


def test_a_mixture_of_spellings_is_refused(qv: AdapterFolder) -> None:
    assert "'model.'" in refusal(qv.rename(lambda n: n.replace("model.model.layers.1", "model.layers.1")))


def test_a_tensor_in_the_wrong_block_is_refused(qv: AdapterFolder) -> None:
    assert "0 of 8" in refusal(qv.rename(lambda name: name.replace("self_attn", "mlp")))


@pytest.mark.parametrize("missing", ["lora_A", "lora_B"])
def test_half_a_pair_is_refused(missing: str, qv: AdapterFolder) -> None:
    tensors = qv.tensors
    del tensors[f"{P}v_proj.{missing}.weight"]
    assert f"no {missing} beside it" in refusal(qv.store(tensors))


def test_a_layer_the_base_does_not_have_is_refused(qv: AdapterFolder) -> None:
    message = refusal(qv.rename(lambda name: name.replace("layers.1.", "layers.2.")))
    assert "layer 2, the base has layers 0 to 1" in message


# ------------------------------------------------------------------ targets


def test_a_tensor_that_the_config_does_not_cover_is_refused(qv: AdapterFolder) -> None:
    for targets in (["q_proj"], r".*\.q_proj", [], "q_proj"):
        assert "target_modules does not cover" in refusal(qv.configure(target_modules=targets))
    assert "exclude_modules excludes" in refusal(
        qv.configure(target_modules=["q_proj", "v_proj"], exclude_modules=["layers.1.self_attn.v_proj"])
    )


def test_tensors_outside_the_transformed_layers_are_refused(qv: AdapterFolder) -> None:
    assert "does not cover model.layers.1" in refusal(qv.configure(layers_to_transform=[0]))


def test_modules_without_tensors_and_targets_without_modules_are_noted(qv: AdapterFolder) -> None:
    warnings = check(qv.configure(target_modules=["q_proj", "v_proj", "k_proj", "w7_proj"])).warnings
    assert any("of 6 linears the config adapts, the file has 4" in warning for warning in warnings)
    assert any("w7_proj" in warning for warning in warnings)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        {"layers_pattern": "layers"},
        {"target_modules": {"q_proj": 1}},
        {"target_modules": ["q_proj", 3]},
        {"layers_to_transform": True},
        {"layers_to_transform": ["0"]},
        {"use_rslora": "yes"},
        {"rank_pattern": ["q_proj"]},
        {"r": "8"},
        {"r": True},
        {"r": 2.0},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 1e300},
        {"alpha_pattern": {"q_proj": None}},
        {"init_lora_weights": "unheard-of"},
        {"init_lora_weights": 3},
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_key(config: dict[str, Any], qv: AdapterFolder) -> None:
    message = refusal(qv.configure(**config))
    assert any(key in message for key in config) or "scale" in message


# ------------------------------------------------------------------ ranks, shapes, values


def test_another_bases_shapes_are_refused_with_both(qv: AdapterFolder) -> None:
    tensors = qv.tensors | {f"{P}q_proj.lora_A.weight": np.zeros((2, 4096), np.float32)}
    message = refusal(qv.store(tensors))
    assert "[2, 4096]" in message
    assert "[2, 32]" in message


def test_another_bases_name_is_only_noted_and_nothing_is_fetched(
    qv: AdapterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", no_network)
    qv.configure(
        base_model_name_or_path="no-such-org/other-13b",
        auto_mapping={"base_model_class": "X", "parent_library": "evil"},
        revision="main",
    )
    spec = check(qv)
    assert any("different base" in warning and "other-13b" in warning for warning in spec.warnings)
    assert check(qv.configure(base_model_name_or_path="some-org/Tiny")).warnings == []


def test_a_rank_that_is_not_the_tensors_is_refused(qv: AdapterFolder) -> None:
    message = refusal(qv.configure(r=4))
    assert "[2, 32]" in message
    assert "[4, 32]" in message


@pytest.mark.parametrize("config", [{"r": 512}, {"rank_pattern": {"v_proj": 512}}])
def test_a_rank_above_the_limit_is_refused(config: dict[str, Any], qv: AdapterFolder) -> None:
    assert "rank 512 is above the limit of 64" in refusal(qv.configure(**config))


@pytest.mark.parametrize("config", [{"r": 0}, {"rank_pattern": {"v_proj": 0}}, {"r": -1}])
def test_rank_zero_is_refused(config: dict[str, Any], qv: AdapterFolder) -> None:
    assert "a rank is a whole number from 1" in refusal(qv.configure(**config))


def test_empty_tensors_and_empty_files_are_refused(qv: AdapterFolder) -> None:
    message = refusal(qv.store(qv.tensors | {f"{P}q_proj.lora_A.weight": np.zeros((0, 32), np.float32)}))
    assert "[0, 32]" in message
    save_file({}, qv.path / "adapter_model.safetensors")
    assert "holds no tensors" in refusal(qv)


def test_an_adapter_whose_b_is_all_zero_loads_and_is_said_to_contribute_nothing(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_llama(2), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    spec = check(tmp_path)
    assert spec.matched == 4
    assert any("the adapter contributes nothing" in warning for warning in spec.warnings)


def test_alpha_zero_loads_and_is_said_to_contribute_nothing(qv: AdapterFolder) -> None:
    assert any("contribute nothing" in warning for warning in check(qv.configure(lora_alpha=0)).warnings)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_that_are_no_numbers_are_refused_by_tensor(
    value: float, dtype: Any, qv: AdapterFolder
) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in qv.tensors.items()}
    tensors[f"{P}v_proj.lora_B.weight"][3, 1] = value
    assert f"{P}v_proj.lora_B.weight" in refusal(qv.store(tensors))


def test_number_forms_are_kept_and_others_refused(qv: AdapterFolder) -> None:
    tensors = {name: torch.from_numpy(value) for name, value in qv.tensors.items()}
    for dtype, form in ((torch.float16, "F16"), (torch.bfloat16, "BF16")):
        save_file({k: v.to(dtype) for k, v in tensors.items()}, qv.path / "adapter_model.safetensors")
        assert check(qv).dtype == form
    for dtype, form in ((torch.float64, "F64"), (torch.int8, "I8")):
        save_file({k: v.to(dtype) for k, v in tensors.items()}, qv.path / "adapter_model.safetensors")
        assert f"dtype {form}" in refusal(qv)
