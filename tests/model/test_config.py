"""config.json: what is understood, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from heddle.core.model.config import ModelConfig, ModelError
from heddle.core.model.rope import cos_sin_table, inverse_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3 = {
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """The base config with `changes`; a change to `...` removes the key."""
    values = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return ModelConfig.load(folder)


def kind(architecture: str) -> dict[str, Any]:
    return {"architectures": [f"{architecture}ForCausalLM"], "model_type": architecture.lower()}


def test_config_is_read_without_torch(tmp_path: Path) -> None:
    read(tmp_path)
    code = (
        "import sys; from pathlib import Path; from heddle.core.model.config import ModelConfig;"
        "folder = Path(sys.argv[1]); ModelConfig.load(folder).base_model('t', folder);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_frequencies_are_the_published_ones(tmp_path: Path, form: str, key: str) -> None:
    rope = {**LLAMA3, key: "llama3"}
    where = {"rope_scaling": rope, "rope_theta": 5e5}
    if form == "rope_parameters":
        where = {"rope_parameters": {**rope, "rope_theta": 5e5}}
    config = read(tmp_path, head_dim=16, **where)
    expected = [1, 0.193923, 0.037606, 0.00729267, 0.000524846, 3.4281e-05, 6.64787e-06, 1.28917e-06]
    assert inverse_frequencies(config.rope, config.head_dim).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "original_max_position_embeddings": 64},
    ],
)
@pytest.mark.parametrize(("head_dim", "theta"), [(8, 1e4), (64, 1e5), (128, 5e5)])
def test_tables_are_transformers_bit_for_bit(
    tmp_path: Path, rope: dict[str, Any], head_dim: int, theta: float
) -> None:
    changes = {"head_dim": head_dim, "rope_parameters": {**rope, "rope_theta": theta}}
    config = read(tmp_path, **changes)
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**{**BASE, **changes})
    )
    assert torch.equal(inverse_frequencies(config.rope, head_dim), module.inv_freq)
    positions = torch.arange(10_000)
    cos, sin = cos_sin_table(config.rope, head_dim, 10_000)
    expected = module(torch.zeros(1), positions.unsqueeze(0))
    assert torch.equal(cos, expected[0][0, :, : head_dim // 2])
    assert torch.equal(sin, expected[1][0, :, : head_dim // 2])


@pytest.mark.parametrize("name", ["dynamic", "yarn", "longrope", "su", "mrope", "invented"])
def test_unknown_rope_types_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        read(tmp_path, rope_scaling={"type": name, "factor": 2.0})
    with pytest.raises(ModelError, match=name):
        read(tmp_path, rope_parameters={"rope_type": name, "factor": 2.0, "rope_theta": 1e4})


def test_two_spellings_of_rope_must_agree(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    config = read(tmp_path, rope_scaling=linear, rope_parameters={**linear, "rope_theta": 1e4})
    assert (config.rope.type, config.rope.factor) == ("linear", 2.0)
    with pytest.raises(ModelError, match="contradict"):
        read(tmp_path, rope_scaling=linear, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(ModelError, match="rope_theta"):
        read(tmp_path, rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


@pytest.mark.parametrize("lost", ["factor", "low_freq_factor", "high_freq_factor"])
def test_a_missing_rope_setting_is_named(tmp_path: Path, lost: str) -> None:
    rope = {"rope_type": "llama3", **LLAMA3}
    del rope[lost]
    with pytest.raises(ModelError, match=lost):
        read(tmp_path, rope_scaling=rope)


def test_head_dim_may_differ_from_hidden_over_heads(tmp_path: Path) -> None:
    config = read(tmp_path, hidden_size=28, num_attention_heads=3, num_key_value_heads=1, head_dim=8)
    shapes = config.linear_shapes
    assert (shapes["q_proj"], shapes["k_proj"], shapes["o_proj"]) == ((24, 28), (8, 28), (28, 24))
    assert read(tmp_path, head_dim=None).head_dim == 8
    with pytest.raises(ModelError, match="head_dim is not given"):
        read(tmp_path, hidden_size=28, num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(ModelError, match="even"):
        read(tmp_path, head_dim=7)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8, "use_sliding_window": False},
        {"sliding_window": None},
        {"sliding_window": None, "use_sliding_window": True},
        {"sliding_window": 256},
        {"sliding_window": 8, "use_sliding_window": False, **kind("Mistral")},
        {"sliding_window": 8, **kind("Qwen2")},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2, **kind("Qwen2")},
        {"sliding_window": 8, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, **changes).max_position_embeddings == 256


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 8},
        {"sliding_window": 8, **kind("Mistral")},
        {"max_position_embeddings": 8192, **kind("Mistral")},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, **kind("Qwen2")},
        {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
    ],
)
def test_a_real_window_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="sliding_window"):
        read(tmp_path, **changes)


def test_end_tokens_of_all_three_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2, 5)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<end>"}]}')
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2, 5, 7)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "</s>": 9}}}')
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2, 5, 9)
    added = '{"eos_token": "</s>", "added_tokens_decoder": {"3": {"content": "</s>"}}}'
    (tmp_path / "tokenizer_config.json").write_text(added)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == (2, 3, 5)


def test_end_tokens_that_cannot_occur_are_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[2, 64, -1]).eos_token_ids == (2,)
    assert read(tmp_path).eos_token_ids == ()


@pytest.mark.parametrize("value", ["2", [2, None, 1.5], True, -2, {}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        read(tmp_path, eos_token_id=value)


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    for absent in (..., None):
        with pytest.raises(ModelError, match=key):
            read(tmp_path, **{key: absent})


def test_llama_1_has_as_many_kv_heads_as_heads(tmp_path: Path) -> None:
    assert read(tmp_path, num_key_value_heads=...).num_kv_heads == 4
    for architecture in ("Mistral", "Qwen2"):
        with pytest.raises(ModelError, match="num_key_value_heads"):
            read(tmp_path, num_key_value_heads=..., **kind(architecture))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -32),
        ("hidden_size", 32.0),
        ("hidden_size", "32"),
        ("num_hidden_layers", True),
        ("vocab_size", 0),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", 0),
        ("rope_theta", -1e4),
        ("attention_bias", "yes"),
        ("tie_word_embeddings", 1),
        ("torch_dtype", "int4"),
        ("hidden_act", "gelu"),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", "int8"),
        ("sliding_window", "wide"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_key(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        read(tmp_path, **{key: value})


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GemmaForCausalLM", "LlamaModel", "MixtralForCausalLM"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        read(tmp_path, architectures=[name])
    with pytest.raises(ModelError, match="model_type"):
        read(tmp_path, model_type="gemma")


def test_biases_follow_the_architecture(tmp_path: Path) -> None:
    def biases(**changes: Any) -> tuple[bool, bool, bool]:
        config = read(tmp_path, **changes)
        return config.attention_bias, config.attention_output_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(**kind("Qwen2")) == (True, False, False)
    assert biases(**kind("Mistral")) == (False, False, False)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.load(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"config\.json"):
            ModelConfig.load(tmp_path)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
def test_what_transformers_saves_is_read_as_transformers_means_it(tmp_path: Path, name: str) -> None:
    made = getattr(transformers, f"{name}Config")(
        **{**BASE, "architectures": [f"{name}ForCausalLM"]},
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4},
    )
    made.save_pretrained(tmp_path)
    config = ModelConfig.load(tmp_path)
    assert config.architecture == f"{name}ForCausalLM"
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("linear", 4.0, 2e4)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (2, 8, 1e-5)


class TestFingerprint:
    """The identity that adapters are bound to."""

    def fingerprint(self, folder: Path, **changes: Any) -> str:
        return read(folder, **changes).base_model("t", folder).fingerprint

    def test_the_number_form_does_not_matter(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
        plain = self.fingerprint(tmp_path)
        assert plain.startswith("sha256:")
        quantized = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        assert self.fingerprint(tmp_path, quantization_config=quantized, torch_dtype="bfloat16") == plain
        assert self.fingerprint(tmp_path, transformers_version="9") == plain
        (tmp_path / "tokenizer.json").write_text('{"model":{"vocab":{"b":1,"a":0}},"padding":null}')
        assert self.fingerprint(tmp_path) == plain

    def test_shapes_and_vocabulary_do(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        seen = {self.fingerprint(tmp_path)}
        for change in (
            {"num_hidden_layers": 3},
            {"intermediate_size": 96},
            {"vocab_size": 65},
            kind("Mistral"),
        ):
            seen.add(self.fingerprint(tmp_path, **change))
        (tmp_path / "tokenizer.json").write_text(
            '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}'
        )
        seen.add(self.fingerprint(tmp_path))
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"b": 0}}}')
        seen.add(self.fingerprint(tmp_path))
        (tmp_path / "tokenizer.json").unlink()
        seen.add(self.fingerprint(tmp_path))
        assert len(seen) == 8

    def test_shapes_are_those_of_the_linears(self, tmp_path: Path) -> None:
        base = read(tmp_path).base_model("toy", tmp_path)
        assert (base.name, base.num_layers, base.vocab_size) == ("toy", 2, 64)
        assert base.folder == str(tmp_path)
        assert base.shapes == {
            "q_proj": (32, 32),
            "k_proj": (16, 32),
            "v_proj": (16, 32),
            "o_proj": (32, 32),
            "gate_proj": (64, 32),
            "up_proj": (64, 32),
            "down_proj": (32, 64),
        }
