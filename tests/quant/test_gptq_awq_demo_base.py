"""The demo base in packed layers that AutoGPTQ and AutoAWQ made: run where those files are at hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from heddle.quant.packed import PackedLinear
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..model.conftest import Bench, close, load, oracle
from .packers import AWQ_ORDER, SHARED

FILES = {
    "gptq": "smollm2-135m-gptq-g64-actorder.layers.safetensors",
    "awq": "smollm2-135m-awq-g64.layers.safetensors",
}
PROMPT = [1, 4093, 198, 504, 3575, 282, 4649, 314, 1027, 30, 28, 2090, 19, 5]

pytestmark = pytest.mark.skipif(
    not all((SHARED / name).is_file() for name in FILES.values()), reason="the tools' layers are not here"
)


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> [R, C, 8], from the lowest on."""
    return torch.stack([words >> 4 * i & 15 for i in range(8)], dim=2)


def dequantised(method: str, layers: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """float32 [N, K], by the format's description."""
    words, zeros = layers[f"{name}.qweight"], nibbles(layers[f"{name}.qzeros"])
    scales = layers[f"{name}.scales"].float()
    if method == "gptq":
        codes = nibbles(words).transpose(1, 2).flatten(0, 1)
        index, zeros = layers[f"{name}.g_idx"].long(), zeros.flatten(1) + 1
    else:
        back = [AWQ_ORDER.index(i) for i in range(8)]
        codes = nibbles(words)[:, :, back].flatten(1)
        index, zeros = torch.arange(len(codes)) // 64, zeros[:, :, back].flatten(1)
    return ((codes - zeros[index]).float() * scales[index]).T.contiguous()


@pytest.fixture(scope="module", params=FILES)
def packed(
    request: pytest.FixtureRequest, demo_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any]:
    """Method, folder, and transformers' float32 model with the layers' dequantised weights."""
    method = str(request.param)
    layers = load_file(SHARED / FILES[method])
    with safe_open(SHARED / FILES[method], framework="pt") as file:
        said = file.metadata()
    folder = tmp_path_factory.mktemp(method)
    for path in demo_base.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, folder / path.name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(demo_base, dtype=torch.float32).eval()
    kept = {"model.embed_tokens.weight": reference.model.embed_tokens.weight.detach().half()}
    save_file(
        {**layers, **{name: t for name, t in kept.items() if name not in layers}},
        folder / "model.safetensors",
    )
    settings: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": int(said["group_size"])}
    if method == "gptq":
        settings |= {"desc_act": True, "sym": True, "checkpoint_format": said["checkpoint_format"]}
    else:
        settings |= {"zero_point": True, "version": said["version"]}
    config = json.loads((demo_base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with torch.no_grad():
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(dequantised(method, layers, name))
        for name, weight in reference.named_parameters():
            if name in layers:
                weight.copy_(layers[name])
    return method, folder, reference


def test_logits_are_those_of_the_dequantised_weights(packed: tuple[str, Path, Any]) -> None:
    method, folder, reference = packed
    model = load(folder, "cpu", max_positions=64)
    assert model.quantization == method
    found = Bench(model, block_size=16).step({"a": PROMPT})["a"]
    expected = oracle(reference, PROMPT)
    close(found, expected, 1e-4)
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_weights_are_exactly_what_the_format_says_and_stay_packed(packed: tuple[str, Path, Any]) -> None:
    _, folder, reference = packed
    model = load(folder, "cpu", max_positions=64)
    held = weights = 0
    for index, layer in enumerate(model.layers):
        own = reference.model.layers[index]
        for projection, names in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.out, ("self_attn.o_proj",)),
            (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.down, ("mlp.down_proj",)),
        ):
            expected = torch.cat([own.get_submodule(name).weight.detach() for name in names])
            assert isinstance(projection.linear, PackedLinear), "the tool gives q, k, v one order"
            assert torch.equal(projection.linear.dequantize(), expected)
            held += projection.linear.weight_bytes
            weights += expected.numel()
    assert held / weights < 0.6
