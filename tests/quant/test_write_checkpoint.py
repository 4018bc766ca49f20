"""What `heddle quantize` writes: read back, served, and measured on what the tools measure on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from heddle import LLM, SamplingParams
from heddle.core.model.config import ModelConfig, ModelError
from heddle.core.quantize import driver
from heddle.core.quantize.calibration import pieces
from heddle.core.quantize.driver import quantize
from heddle.core.quantize.float_layer import LayerMath
from heddle.core.quantize.layers import awq_layer
from heddle.core.quantize.settings import QuantizeSettings
from heddle.core.quantize.source import Source
from heddle.core.text.tokenizer import Tokenizer

from ..model.conftest import close, oracle
from .gptq_by_columns import by_columns
from .write_models import TEXT, TOKENS, gptq_weight, put_back, read_tensors, save_float, serves

STAGES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def settings(tmp_path: Path, method: str, **changes: Any) -> QuantizeSettings:
    """A calibration of 40 samples of 32 tokens for the methods that take one."""
    if method == "int8":
        return QuantizeSettings(method="int8", **changes)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    common = {"calibration": text, "samples": 40, "sample_tokens": 32, "group_size": 16}
    return QuantizeSettings(method=method, **{**common, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("gptq", {}),
        ("gptq", {"desc_act": False}),
        ("gptq", {"sym": False, "desc_act": False}),
        ("gptq", {"sym": False, "desc_act": True, "group_size": 32}),
        ("gptq", {"bits": 8, "desc_act": True}),
        ("gptq", {"group_size": -1, "bits": 8, "sym": False, "desc_act": False}),
        ("gptq", {"group_size": -1, "desc_act": True}),
        ("awq", {}),
        ("awq", {"group_size": 32}),
        ("awq", {"group_size": -1}),
        ("int8", {}),
    ],
)
def test_served_logits_are_those_of_the_files_by_hand(
    tmp_path: Path, method: str, how: dict[str, Any]
) -> None:
    """Heads of 8, twice as many for q as for k and v."""
    reference = save_float(tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, method, **how))
    serves(tmp_path / "out", put_back(reference, tmp_path / "out", method, how.get("bits", 4)))


@pytest.mark.parametrize("method", ["gptq", "awq", "int8"])
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        (
            "Llama",
            {"num_key_value_heads": 4, "attention_bias": True},
        ),  # v and o of one shape: AWQ scales o too
        ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
        ("Qwen2", {}),
        ("Mistral", {"sliding_window": None}),
    ],
)
def test_every_kind_of_model_is_written_as_it_is(
    tmp_path: Path, method: str, kind: str, model: dict[str, Any]
) -> None:
    reference = save_float(tmp_path / "float", kind, **model)
    quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, method))
    original = oracle(reference, TOKENS)
    written = put_back(reference, tmp_path / "out", method)
    serves(tmp_path / "out", written)
    error = (oracle(written, TOKENS) - original).norm() / original.norm()
    assert error < {"gptq": 0.6, "awq": 0.6, "int8": 0.05}[method]


def inputs_of(module: torch.nn.Module, model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What `module` gets when `model` runs."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_hook(lambda _, x, __: seen.append(x[0]))
    with torch.no_grad():
        model(tokens)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("act_order", [False, True])
def test_each_linear_is_measured_on_the_outputs_of_those_rounded_before_it(
    tmp_path: Path, act_order: bool
) -> None:
    """transformers runs the model with all that comes before a stage rounded already; its inputs there, and the
    paper's algorithm in float64, give the weights in the file.
    """
    reference = save_float(tmp_path / "float")
    how = settings(tmp_path, "gptq", desc_act=act_order)
    quantize(tmp_path / "float", tmp_path / "out", how)
    tensors = read_tensors(tmp_path / "out")
    samples = torch.tensor(pieces(TEXT, Tokenizer.load(tmp_path / "float"), 40, 32))
    for layer in reference.model.layers:
        modules = {name.rsplit(".", 1)[-1]: (name, module) for name, module in layer.named_modules()}
        for stage in STAGES:
            x = inputs_of(modules[stage[0]][1], reference, samples).flatten(0, 1).double().numpy()
            for module in stage:
                name, linear = modules[module]
                full = f"model.layers.{layer.self_attn.layer_idx}.{name}"
                expected, g_idx = by_columns(
                    linear.weight.detach().numpy(), 2 * x.T @ x / len(x), 4, 16, act_order, True, 0.01
                )
                found = gptq_weight(tensors, full, 4)
                assert np.array_equal(tensors[f"{full}.g_idx"].numpy(), g_idx)
                step = tensors[f"{full}.scales"].float().numpy().T[:, g_idx]
                assert (np.abs(found.numpy() - expected) > 0.05 * step).mean() < 0.03
                with torch.no_grad():
                    linear.weight.copy_(found)


@pytest.mark.parametrize("model", [{}, {"num_key_value_heads": 4}])
def test_scales_folded_into_norms_and_linears_change_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    """With codes fine enough to hold the weights: what AWQ multiplies in is divided out again."""
    reference = save_float(tmp_path, attention_bias=True, mlp_bias=True, **model)
    source, math = Source(tmp_path), LayerMath(ModelConfig.load(tmp_path), 12)
    layer, hidden = source.layer(0), torch.randn(5, 12, 32, generator=torch.Generator().manual_seed(3))
    before = {name: weight.clone() for name, weight in layer.weights.items()}
    monkeypatch.setattr("heddle.core.quantize.layers.UNCLIPPED", tuple(before))
    _, output = awq_layer(layer, math, hidden, 16, [torch.float16, torch.bfloat16])
    module = reference.model.layers[0]
    rotary = reference.model.rotary_emb(hidden, torch.arange(12).unsqueeze(0))
    mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]

    def theirs() -> torch.Tensor:
        with torch.no_grad():
            return module(hidden, attention_mask=mask, position_embeddings=rotary)

    close(output, theirs(), 1e-5)
    changed = {name for name, weight in layer.weights.items() if not torch.equal(weight, before[name])}
    assert changed == set(before) - (set() if "num_key_value_heads" in model else {"o_proj"})
    with torch.no_grad():
        module.input_layernorm.weight.copy_(layer.input_norm)
        module.post_attention_layernorm.weight.copy_(layer.mlp_norm)
        for name, weight in layer.weights.items():
            linear = getattr(module.self_attn if hasattr(module.self_attn, name) else module.mlp, name)
            linear.weight.copy_(weight)
            linear.bias.copy_(layer.biases[name])
    close(theirs(), output, 1e-5)


def test_a_written_checkpoint_answers(tmp_path: Path) -> None:
    save_float(tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, "gptq"))
    with LLM(tmp_path / "out") as llm:
        answers = llm.generate(["abc", "xyz"], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [5, 5]


@pytest.mark.parametrize("begin", [False, True])
def test_pieces_begin_as_a_text_does(tmp_path: Path, begin: bool) -> None:
    save_float(tmp_path, begin=begin)
    tokenizer = Tokenizer.load(tmp_path)
    found = pieces("ab" * 1000, tokenizer, 3, 10)
    assert [len(piece) for piece in found] == [10, 10, 10]
    assert {piece[0] == tokenizer.bos_token_id for piece in found} == {begin}
    assert {tokenizer.bos_token_id in piece[1:] for piece in found} == {False}


def test_pieces_are_spread_over_the_text(tmp_path: Path) -> None:
    save_float(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "".join(letter * 500 for letter in "abcd")
    found = pieces(text, tokenizer, 4, 100)
    assert [tokenizer.decode(piece) for piece in found] == [letter * 100 for letter in "abcd"]


def test_settings_are_where_the_tools_put_them(tmp_path: Path) -> None:
    save_float(tmp_path / "float")
    for method, side_file in (("gptq", "quantize_config.json"), ("awq", "quant_config.json"), ("int8", None)):
        out = tmp_path / method
        quantize(tmp_path / "float", out, settings(tmp_path, method))
        config = json.loads((out / "config.json").read_text())
        before = json.loads((tmp_path / "float" / "config.json").read_text())
        said = config.pop("quantization_config")
        assert config == before
        kind = {"gptq": "gptq", "awq": "awq", "int8": "bitsandbytes"}[method]
        assert said["quant_method"] == kind
        assert side_file is None or (out / side_file).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (out / name).read_bytes() == (tmp_path / "float" / name).read_bytes()
        assert {oct(path.stat().st_mode & 0o044) for path in out.iterdir()} == {"0o44"}
    assert json.loads((tmp_path / "gptq" / "quantize_config.json").read_text()) == {
        "bits": 4,
        "group_size": 16,
        "damp_percent": 0.01,
        "desc_act": True,
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": None,
        "is_marlin_format": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
    }


def test_transformers_loads_the_int8_folder_as_it_makes_its_own(tmp_path: Path) -> None:
    save_float(tmp_path / "float", attention_bias=True)
    quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, "int8"))
    made = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float",
        quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True),
        device_map="cpu",
    )
    made.save_pretrained(tmp_path / "theirs")
    ours, theirs = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu")
    with torch.no_grad():
        tokens = torch.tensor([TOKENS])
        assert torch.equal(loaded(tokens).logits, made(tokens).logits)


def test_a_large_checkpoint_comes_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = save_float(tmp_path / "float")
    monkeypatch.setattr(driver.Shards.__init__, "__defaults__", (20_000,))
    quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, "gptq"))
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    total = sum(tensor.nbytes for tensor in read_tensors(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == total
    serves(tmp_path / "out", put_back(reference, tmp_path / "out", "gptq"))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_stay_sixteen_bits(tmp_path: Path, method: str, dtype: str) -> None:
    reference = save_float(tmp_path / "float32")
    for path in (tmp_path / "float32").glob("*token*"):
        (tmp_path / "float").mkdir(exist_ok=True)
        (tmp_path / "float" / path.name).write_bytes(path.read_bytes())
    reference.to(getattr(torch, dtype)).save_pretrained(tmp_path / "float")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, method))
    tensors = read_tensors(tmp_path / "out")
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight")):
            assert tensor.dtype == getattr(torch, dtype), name
        if name.endswith("scales"):
            assert tensor.dtype == torch.float16
    serves(tmp_path / "out", put_back(reference, tmp_path / "out", method))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"method": "gptq", "bits": 3}, "bits 3 is not available for gptq"),
        ({"method": "awq", "bits": 8}, "bits 8 is not available for awq"),
        ({"method": "int8", "bits": 4}, "bits 4 is not available for int8"),
        ({"method": "int8", "group_size": 64}, "takes no group_size"),
        ({"method": "gptq", "group_size": 48}, "group_size 48 does not divide the 32 inputs of q_proj"),
        ({"method": "gptq", "group_size": 24}, "group_size 24 is not available"),
        ({"method": "gptq", "group_size": 0}, "group_size 0 is not available"),
        (
            {"method": "awq", "group_size": 64},
            "group_size 64 does not divide the 32 inputs of q_proj; 32 would fit",
        ),
        ({"method": "awq", "desc_act": True}, "desc_act is a setting of gptq"),
        ({"method": "awq", "sym": False}, "sym is a setting of gptq"),
        ({"method": "gptq", "damp": 0.0}, "damp must lie between 0 and 1"),
        ({"method": "gptq", "sample_tokens": 1000}, "beyond the model's context of 256"),
        ({"method": "gptq", "samples": 0}, "samples must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, how: dict[str, Any], message: str
) -> None:
    save_float(tmp_path / "float")
    with pytest.raises(ModelError, match=message):
        quantize(tmp_path / "float", tmp_path / "out", QuantizeSettings(**how))
    assert {path.name for path in tmp_path.iterdir()} == {"float"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b" \n ", "empty"),
        (b"too short", "too short: 9 tokens"),
        (b"\xff\xfe\x00", "UTF-8"),
        (None, "read"),
    ],
)
def test_a_calibration_text_that_says_nothing_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    save_float(tmp_path / "float")
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        quantize(tmp_path / "float", tmp_path / "out", QuantizeSettings(method="gptq", calibration=text))
    assert "calibration text" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("first", ["gptq", "awq", "int8"])
def test_a_quantised_model_is_not_quantised_again(tmp_path: Path, first: str) -> None:
    save_float(tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "once", settings(tmp_path, first))
    with pytest.raises(ModelError, match="quantised already"):
        quantize(tmp_path / "once", tmp_path / "out", settings(tmp_path, "gptq"))


def test_an_output_folder_that_exists_is_refused_and_kept(tmp_path: Path) -> None:
    save_float(tmp_path / "float")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists already"):
        quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, "int8"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_model_with_a_missing_or_unknown_tensor_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    save_float(tmp_path / "float")
    config = tmp_path / "float" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks 9 tensors: model\.layers\.2"):
        quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, "gptq"))


def test_a_failure_midway_leaves_nothing(tmp_path: Path) -> None:
    save_float(tmp_path / "float")

    def fail(what: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "float", tmp_path / "out", settings(tmp_path, "gptq"), fail)
    assert {path.name for path in tmp_path.iterdir()} == {"float", "text.txt"}


def _stopping(folder: Path, how: QuantizeSettings, ready: Any) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done == 1:
            ready.set()
            time.sleep(60)

    quantize(folder / "float", folder / "out", how, stop)


def test_a_kill_midway_leaves_no_half_folder_and_the_next_run_works(tmp_path: Path) -> None:
    save_float(tmp_path / "float")
    how = settings(tmp_path, "int8")
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_stopping, args=(tmp_path, how, ready))
    process.start()
    assert ready.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out").exists()
    quantize(tmp_path / "float", tmp_path / "out", how)
    assert (tmp_path / "out" / "model.safetensors").is_file()
