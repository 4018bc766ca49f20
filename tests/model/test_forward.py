"""Our forward against transformers on tiny random models, through shuffled and poisoned pool blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "Llama"},
    "one kv head": {"kind": "Llama", "num_key_value_heads": 1},
    "no grouping": {"kind": "Llama", "num_key_value_heads": 4},
    "explicit head_dim": {"kind": "Llama", "head_dim": 16},
    # transformers' LLaMA refuses heads that do not divide hidden_size; its Mistral computes the same.
    "uneven head_dim": {
        "kind": "Mistral",
        "hidden_size": 28,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": None,
    },
    "all biases": {"kind": "Llama", "attention_bias": True, "mlp_bias": True},
    "tied": {"kind": "Llama", "tie_word_embeddings": True},
    "rope linear": {
        "kind": "Llama",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "rope llama3": {
        "kind": "Llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_theta": 5e5,
        },
    },
    "mistral": {"kind": "Mistral", "sliding_window": None},
    "qwen2": {"kind": "Qwen2"},
    "qwen2 tied": {"kind": "Qwen2", "tie_word_embeddings": True},
    "eps": {"kind": "Llama", "rms_norm_eps": 0.3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_transformers_in_one_go_in_chunks_and_mixed(
    tiny: Any, tmp_path: Path, backend: str, prompts: dict[str, list[int]], variant: str
) -> None:
    reference = tiny.save(tmp_path, **VARIANTS[variant])
    expected = {name: tiny.oracle(reference, tokens) for name, tokens in prompts.items()}
    model = tiny.load(tmp_path, backend)

    whole = tiny.Bench(model).step({"a": prompts["a"]})
    tiny.close(whole["a"], expected["a"])

    mixed = tiny.Bench(model).step(prompts)
    for name in prompts:
        tiny.close(mixed[name], expected[name])

    # Ragged: long chunks beside single tokens, sequences coming and going.
    bench = tiny.Bench(model)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    sizes = {"a": [7, 1, 1, 9, 3], "b": [1], "c": [1, 1, 1, 5], "d": [13]}
    done = dict.fromkeys(prompts, 0)
    for round_ in range(5):
        chunks = {}
        for name in ["d", "a", "c", "b"]:
            if round_ < len(sizes[name]):
                size = sizes[name][round_]
                chunks[name] = prompts[name][done[name] : done[name] + size]
                done[name] += size
        for name, logits in bench.step(chunks).items():
            found[name].append(logits)
    for name in prompts:
        tiny.close(torch.cat(found[name]), expected[name])


def test_decoding_token_by_token_is_transformers(tiny: Any, tmp_path: Path, backend: str) -> None:
    """Greedy continuation of three sequences in one batch equals transformers' own `generate`."""
    reference = tiny.save(tmp_path)
    model = tiny.load(tmp_path, backend)
    prompts = {"a": [5, 9, 2], "b": [7], "c": [1, 2, 3, 4, 5, 6, 7, 8, 9]}
    bench = tiny.Bench(model)
    chunks = prompts
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for _ in range(20):
        logits = bench.step(chunks)
        chunks = {name: [int(logits[name][-1].argmax())] for name in prompts}
        for name in prompts:
            found[name] += chunks[name]
    for name, prompt in prompts.items():
        generated = reference.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert found[name] == generated[0, len(prompt) :].tolist()


def test_positions_far_out_keep_their_angles(tiny: Any, tmp_path: Path, backend: str) -> None:
    reference = tiny.save(tmp_path, max_position_embeddings=4096)
    tokens = [(i * 7919 + i // 5) % 64 for i in range(1500)]
    bench = tiny.Bench(tiny.load(tmp_path, backend), num_blocks=400)
    found = [bench.step({"a": tokens[start : start + 500]})["a"] for start in range(0, 1500, 500)]
    tiny.close(torch.cat(found), tiny.oracle(reference, tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_activations_stay_near_float32(tiny: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    reference = tiny.save(tmp_path)
    tokens = list(range(3, 24))
    model = tiny.load(tmp_path, dtype=dtype)
    found = tiny.Bench(model).step({"a": tokens})["a"]
    tiny.close(found, tiny.oracle(reference.to(dtype), tokens), 0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_sixteen_bit_checkpoint_is_exact_in_float32(
    tiny: Any, tmp_path: Path, backend: str, dtype: torch.dtype, tied: bool
) -> None:
    """All weights are held in the checkpoint's 16 bits, which loses nothing."""
    tiny.save(tmp_path, tie_word_embeddings=tied).to(dtype).save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = tiny.load(tmp_path, backend)
    assert model.embedding.weight.dtype == model.layers[1].down.linear.weight.dtype == dtype
    assert torch.equal(model.head.dequantize(), reference.lm_head.weight)
    down = reference.model.layers[1].mlp.down_proj.weight
    assert torch.equal(model.layers[1].down.linear.dequantize(), down)
    tokens = list(range(3, 24))
    tiny.close(tiny.Bench(model).step({"a": tokens})["a"], tiny.oracle(reference, tokens))


def test_a_tied_table_is_held_once(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path / "tied", tie_word_embeddings=True)
    tiny.save(tmp_path / "untied")
    tied, untied = tiny.load(tmp_path / "tied"), tiny.load(tmp_path / "untied")
    assert tied.head is tied.embedding
    assert untied.weight_bytes - tied.weight_bytes == 64 * 32 * 4


def test_the_rotary_table_reaches_as_far_as_asked(tiny: Any, tmp_path: Path) -> None:
    tiny.save(tmp_path)
    assert tiny.load(tmp_path).cos.shape == (256, 4)
    assert tiny.load(tmp_path, max_positions=40).cos.shape == (40, 4)
    assert tiny.load(tmp_path, max_positions=4000).cos.shape == (256, 4)


def test_invariant_products_make_rows_independent_of_their_neighbours(
    tiny: Any, tmp_path: Path, prompts: dict[str, list[int]]
) -> None:
    reference = tiny.save(tmp_path)
    model = tiny.load(tmp_path, "cpu", batch_invariant=True)
    tiny.close(tiny.Bench(model).step({"a": prompts["a"]})["a"], tiny.oracle(reference, prompts["a"]))
    mixed = tiny.Bench(model).step(prompts)
    for name, tokens in prompts.items():
        alone = tiny.Bench(model).step({name: tokens})
        assert torch.equal(alone[name], mixed[name])
