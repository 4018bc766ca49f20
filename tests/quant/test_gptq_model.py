"""Whole models in GPTQ form: the dequantised weights' logits, whatever the file looks like; or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heddle.core.model.config import ModelError
from heddle.core.model.llama import LlamaModel
from heddle.quant.packed import PackedLinear
from heddle.quant.side_by_side import SideBySide
from safetensors.torch import load_file, save_file

from ..model.conftest import Bench, close, load, oracle, save_tiny
from .packers import configure, edit, quantize_model

TOKENS = [(i * 37) % 64 for i in range(21)]
Q, OUT = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(folder: Path, model: dict[str, Any] | None = None, **how: Any) -> Any:
    """A tiny GPTQ checkpoint (q has twice the outputs of k and v), and transformers' model of its weights."""
    return quantize_model(save_tiny(folder, **(model or {})), folder, "gptq", **how)


def agrees(model: LlamaModel, reference: Any) -> None:
    """Prefill in two chunks and a decode give transformers' logits on the dequantised weights."""
    bench = Bench(model)
    steps = [bench.step({"a": part})["a"] for part in (TOKENS[:9], TOKENS[9:-1], TOKENS[-1:])]
    close(torch.cat(steps), oracle(reference, TOKENS), 1e-5)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"symmetric": True},
        {"v2": True},
        {"bits": 8, "group_size": 32},
        {"bits": 8, "v2": True, "symmetric": True, "group_size": -1},
        {"group_size": -1},
        {"group_size": 128},
        {"act_order": "group"},
        {"act_order": "each"},
        {"act_order": "each", "bits": 8, "symmetric": True},
        {"act_order": "group", "group_size": -1},
        {"scale_dtype": np.float32, "zero_biases": True},
    ],
)
def test_logits_are_those_of_the_dequantised_weights(
    tmp_path: Path, backend: str, how: dict[str, Any]
) -> None:
    reference = save(tmp_path, **how)
    model = load(tmp_path, backend)
    assert model.quantization == "gptq"
    assert f"GPTQ, {how.get('bits', 4)} bit" in model.quantization_reason
    assert "config.json" in model.quantization_reason
    agrees(model, reference)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_all_biases_are_added(tmp_path: Path, backend: str, kind: str) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if kind == "Llama" else {}
    reference = save(tmp_path, {"kind": kind, **biases})
    agrees(load(tmp_path, backend), reference)


def test_linears_of_one_input_are_one_matrix_unless_their_orders_differ(tmp_path: Path) -> None:
    for act_order, expected in (("no", PackedLinear), ("group", PackedLinear), ("each", SideBySide)):
        save(tmp_path / act_order, act_order=act_order)
        for layer in load(tmp_path / act_order).layers:
            assert isinstance(layer.qkv.linear, expected)
            assert isinstance(layer.gate_up.linear, expected)
            assert layer.qkv.linear.dequantize().shape == (64, 32)


def test_weights_stay_packed(tmp_path: Path) -> None:
    plain = save_tiny(tmp_path)
    float_bytes = load(tmp_path).weight_bytes
    quantize_model(plain, tmp_path, "gptq", group_size=32)
    weights = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 64 * 32 * 3)
    groups = weights // 32
    assert float_bytes - load(tmp_path).weight_bytes == 4 * weights - weights // 2 - 3 * groups


def test_a_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    save(tmp_path, zero_biases=True)
    edit(tmp_path, lambda tensors: tensors[f"{OUT}.bias"].fill_(0.5))
    with pytest.raises(ModelError, match=rf"{OUT}\.bias is not zero"):
        load(tmp_path)


class TestWhereSettingsAre:
    def test_in_either_file_alone(self, tmp_path: Path, backend: str) -> None:
        reference = save(tmp_path)
        agrees(load(tmp_path, backend), reference)
        configure(tmp_path, quantization_config=None)
        side = {key: value for key, value in SETTINGS.items() if key != "quant_method"}
        (tmp_path / "quantize_config.json").write_text(json.dumps(side))
        model = load(tmp_path, backend)
        assert "quantize_config.json" in model.quantization_reason
        agrees(model, reference)

    def test_in_both(self, tmp_path: Path, backend: str) -> None:
        reference = save(tmp_path)
        (tmp_path / "quantize_config.json").write_text(json.dumps({**SETTINGS, "damp_percent": 0.01}))
        agrees(load(tmp_path, backend), reference)

    def test_both_that_disagree_are_refused_with_both_named(self, tmp_path: Path) -> None:
        save(tmp_path)
        (tmp_path / "quantize_config.json").write_text(json.dumps({**SETTINGS, "bits": 8}))
        with pytest.raises(
            ModelError, match=r"config\.json and quantize_config\.json disagree: bits is 4.*8"
        ):
            load(tmp_path)

    def test_in_neither_is_refused_and_not_guessed(self, tmp_path: Path) -> None:
        save(tmp_path)
        configure(tmp_path, quantization_config=None)
        with pytest.raises(ModelError, match=r"packed tensors .* but no quantisation settings"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 8}, r"qweight is int32 \[4, 32\], but GPTQ, 8 bit.* asks for int32 \[8, 32\]"),
        ({"group_size": 32}, r"qzeros is int32 \[2, 4\], but GPTQ, .*groups of 32.* asks for int32 \[1, 4\]"),
        ({"group_size": -1}, r"scales is float16 \[2, 32\], but .*one group a row.* \[1, 32\]"),
        ({"quant_method": "awq", "version": "gemm"}, r"AWQ, 4 bit.* asks for int32 \[32, 4\]"),
        ({"desc_act": True}, r"lacks .*g_idx"),
        ({"dynamic": {"-:.*o_proj": {}}}, "dynamic"),
        ({"bits": 3}, "bits 3 is not supported"),
        ({"lm_head": True}, r"lm_head is true in config\.json, but lm_head\.weight is in plain float"),
        ({"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "modules_in_block_to_quantize leaves"),
    ],
)
def test_settings_that_the_tensors_deny_are_refused_with_both_named(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    save(tmp_path)
    if "desc_act" in changes:
        edit(tmp_path, lambda tensors: tensors.pop(f"{Q}.g_idx"))
    configure(tmp_path, quantization_config={**SETTINGS, **changes})
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


def test_zeros_stored_unpacked_are_refused_with_both_shapes_and_types(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({f"{Q}.qzeros": torch.full((2, 32), 8.0).half()}))
    with pytest.raises(ModelError, match=rf"{Q}\.qzeros is float16 \[2, 32\].*int32 \[2, 4\]"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_a_tensor_that_is_not_there_is_named(tmp_path: Path, part: str) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{OUT}.{part}"))
    with pytest.raises(ModelError, match=rf"lacks .*{OUT}\.{part}"):
        load(tmp_path)


class TestShards:
    def split(self, folder: Path, names: tuple[str, str]) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shard_of = {name: names[".1." in name] for name in tensors}
        for shard in names:
            save_file({name: t for name, t in tensors.items() if shard_of[name] == shard}, folder / shard)
        index = {"metadata": {}, "weight_map": shard_of}
        (folder / f"{names[0][:-22]}.safetensors.index.json").write_text(json.dumps(index))

    NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    def test_both_are_read(self, tmp_path: Path) -> None:
        reference = save(tmp_path)
        self.split(tmp_path, self.NAMES)
        agrees(load(tmp_path), reference)

    def test_one_that_is_missing_or_cut_is_named(self, tmp_path: Path) -> None:
        save(tmp_path)
        self.split(tmp_path, self.NAMES)
        second = tmp_path / self.NAMES[1]
        whole = second.read_bytes()
        second.write_bytes(whole[:-100])
        with pytest.raises(ModelError, match=self.NAMES[1]):
            load(tmp_path)
        second.unlink()
        with pytest.raises(ModelError, match=f"missing shards.*{self.NAMES[1]}"):
            load(tmp_path)

    def test_files_under_the_tools_own_names_are_found(self, tmp_path: Path) -> None:
        reference = save(tmp_path / "one")
        (tmp_path / "one" / "model.safetensors").rename(tmp_path / "one" / "gptq_model-4bit-16g.safetensors")
        agrees(load(tmp_path / "one"), reference)
        save(tmp_path / "two")
        name = "gptq_model-4bit-16g"
        self.split(
            tmp_path / "two", (f"{name}-00001-of-00002.safetensors", f"{name}-00002-of-00002.safetensors")
        )
        agrees(load(tmp_path / "two"), reference)


class TestHead:
    def test_a_plain_one_stays_as_it_is(self, tmp_path: Path) -> None:
        reference = save(tmp_path)
        head = load(tmp_path).head
        assert torch.equal(head.dequantize(), reference.lm_head.weight.detach())

    @pytest.mark.parametrize("said", [True, None])
    def test_a_packed_one_is_used(self, tmp_path: Path, backend: str, said: bool | None) -> None:
        reference = save(tmp_path, head=True)
        if said is None:
            configure(tmp_path, quantization_config=SETTINGS)
        model = load(tmp_path, backend)
        assert isinstance(model.head, PackedLinear)
        agrees(model, reference)

    def test_a_packed_one_is_used_where_the_plain_embedding_is_tied_to_it(
        self, tmp_path: Path, backend: str
    ) -> None:
        reference = save(tmp_path, {"tie_word_embeddings": True}, head=True)
        model = load(tmp_path, backend)
        assert any("lm_head is packed" in note for note in model.notes)
        assert not torch.equal(model.head.dequantize(), model.embedding.dequantize())
        agrees(model, reference)

    def test_a_packed_one_that_the_settings_deny_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path, head=True)
        configure(tmp_path, quantization_config={**SETTINGS, "lm_head": False})
        with pytest.raises(ModelError, match=r"lm_head\.q.* is there, but lm_head is false"):
            load(tmp_path)

    def test_a_packed_one_without_its_codes_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path, head=True)
        edit(tmp_path, lambda tensors: tensors.pop("lm_head.qweight"))
        with pytest.raises(ModelError, match=r"lacks .*lm_head\.qweight"):
            load(tmp_path)


def test_linears_that_the_settings_leave_in_float_are_read_so(tmp_path: Path, backend: str) -> None:
    packed = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.gate_proj", "mlp.up_proj"]]
    how = {**SETTINGS, "modules_in_block_to_quantize": packed}
    reference = save(tmp_path, skip=("v_proj", "o_proj", "down_proj"), settings=how)
    agrees(load(tmp_path, backend), reference)
    configure(tmp_path, quantization_config=SETTINGS)
    with pytest.raises(ModelError, match=r"v_proj\.weight is torch\.float32, but .*GPTQ"):
        load(tmp_path)


@pytest.mark.parametrize("requested", ["none", "int8", "awq"])
def test_another_form_than_the_files_is_refused(tmp_path: Path, requested: str) -> None:
    save(tmp_path)
    with pytest.raises(ModelError, match=f"quantization {requested} was asked for.*GPTQ"):
        load(tmp_path, quantization=requested)
