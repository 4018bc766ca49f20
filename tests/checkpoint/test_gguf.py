"""GGUF files become the folder they were made from, or are refused by the name of what is not understood."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from heddle.core.checkpoint import CheckpointError, resolve
from heddle.core.text.tokenizer import Tokenizer
from safetensors.numpy import load_file

KINDS = ["F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def converted(path: Path) -> Path:
    return resolve(str(path), cache_dir=path.parent / "cache")


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("kind", "tied"), [("F32", True), *((kind, False) for kind in KINDS)])
def test_weights_equal_what_transformers_reads_from_the_same_file(tiny_llama, recipe, tmp_path, kind, tied):
    """The reference (`gguf_file=`) dequantises, renames and undoes the row order in its own way."""
    import torch
    from transformers import AutoModelForCausalLM

    path = recipe(tiny_llama(tie_word_embeddings=tied), types=lambda name: kind).write(tmp_path / "m.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(converted(path), dtype="auto")
    assert loaded.dtype == (torch.float32 if kind == "F32" else torch.float16)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, values in loaded.state_dict().items():
        assert torch.equal(values, expected[name].to(values.dtype)), name


def test_logits_are_those_of_the_model_that_the_file_was_made_from(tiny_llama, recipe, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    loaded = AutoModelForCausalLM.from_pretrained(converted(recipe(model).write(tmp_path / "m.gguf")))
    token_ids = torch.arange(20)[None]
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_bfloat16_weights_stay_as_they_are(tiny_llama, recipe, tmp_path):
    import torch
    from safetensors.torch import load_file as load_torch

    model = tiny_llama().bfloat16()
    folder = converted(recipe(model, types=lambda name: "BF16").write(tmp_path / "m.gguf"))
    stored = load_torch(folder / "model.safetensors")
    assert stored.keys() == {name for name in model.state_dict() if name != "lm_head.weight"}
    for name, values in stored.items():
        assert values.dtype == torch.bfloat16
        assert torch.equal(values, model.state_dict()[name]), name
    assert config_of(folder)["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("changes", [{}, {"head_dim": 16}, {"attention_bias": True, "mlp_bias": True}])
def test_shapes_and_biases_come_back_exactly(tiny_llama, recipe, tmp_path, changes):
    from transformers import AutoModelForCausalLM

    model = tiny_llama(tie_word_embeddings=False, **changes)
    folder = converted(recipe(model).write(tmp_path / "m.gguf"))
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    for name, values in model.state_dict().items():
        assert np.array_equal(stored[name], values.numpy()), name
    config = AutoModelForCausalLM.from_pretrained(folder).config
    for key in (
        "head_dim",
        "num_key_value_heads",
        "attention_bias",
        "mlp_bias",
        "rms_norm_eps",
        "vocab_size",
    ):
        assert getattr(config, key) == pytest.approx(getattr(model.config, key)), key
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_qwen2_keeps_its_rows_and_biases(recipe, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shapes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=320, num_key_value_heads=2, max_position_embeddings=64, **shapes)
    config.head_dim = 8
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = converted(recipe(model, architecture="qwen2").write(tmp_path / "m.gguf"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    token_ids = torch.arange(20)[None]
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequency_divisors_of_llama_3_become_its_rope_settings(tiny_llama, recipe, tmp_path, factor):
    """The oracle computes the divisors as llama.cpp's converter does, with its own branches."""
    head_dim, divisors = 64, []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500000.0 ** (index / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    model = tiny_llama(head_dim=head_dim)
    made = recipe(model, metadata={"llama.rope.freq_base": 500000.0})
    made.extra["rope_freqs.weight"] = np.array(divisors, dtype=np.float32)
    config = config_of(converted(made.write(tmp_path / "m.gguf")))
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made.extra["rope_freqs.weight"] = np.array([*divisors[:-1], 3.0], dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        converted(made.write(tmp_path / "other.gguf"))


def test_every_end_token_of_the_file_ends_an_answer(tiny_llama, recipe, tmp_path):
    made = recipe(
        tiny_llama(), metadata={"tokenizer.ggml.eot_token_id": 7, "llama.attention.sliding_window": 9}
    )
    folder = converted(made.write(tmp_path / "m.gguf"))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 7]
    assert config_of(folder)["eos_token_id"] == 2
    assert config_of(folder)["sliding_window"] == 9


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count 4 differs"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not served"),
        ({"llama.block_count": 3}, "tensors are missing, for instance model.layers.2."),
        ({"llama.block_count": 1}, r"beyond the 1 layers"),
        ({"llama.embedding_length": None}, "no llama.embedding_length"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv is not one number but \[2, 1\]"),
        ({"llama.feed_forward_length": "64"}, "feed_forward_length is not one number but '64'"),
        ({"split.count": 2}, "one of several parts"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer kind 'bert'"),
        ({"tokenizer.ggml.pre": "made-up"}, "'made-up', is not known"),
        ({"tokenizer.ggml.tokens": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.tokens": [f"t{n}" for n in range(321)]}, "321 tokens, the embedding 320"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tiny_llama, recipe, tmp_path, metadata, message):
    path = recipe(tiny_llama(), metadata=metadata).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=message):
        converted(path)
    assert not [entry for entry in (tmp_path / "cache" / "v1").iterdir() if not entry.name.endswith(".lock")]


def test_another_architecture_is_refused_by_its_name(tiny_llama, recipe, tmp_path):
    path = recipe(tiny_llama(), architecture="gemma").write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="'gemma' is not served"):
        converted(path)


def test_tensors_that_are_missing_or_not_understood_are_named(tiny_llama, recipe, tmp_path):
    made = recipe(tiny_llama(), without={"blk.1.ffn_up.weight"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        converted(made.write(tmp_path / "a.gguf"))
    made = recipe(tiny_llama(), extra={"blk.0.attn_q_norm.weight": np.ones(8, np.float32)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q_norm\.weight is not understood"):
        converted(made.write(tmp_path / "b.gguf"))


def test_values_beyond_float16_or_not_finite_are_refused(tiny_llama, recipe, tmp_path):
    import torch

    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[3] = 1e6
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* range of float16"):
        converted(recipe(model, types=lambda name: "Q8_0").write(tmp_path / "a.gguf"))
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* not finite"):
        converted(recipe(model).write(tmp_path / "b.gguf"))


@pytest.mark.parametrize("size", [0, 3, 4, 100, 5000, -1])
def test_a_truncated_file_is_refused(tiny_llama, recipe, tmp_path, size):
    path = recipe(tiny_llama()).write(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:size])
    with pytest.raises(CheckpointError, match="GGUF file"):
        converted(path)


def test_a_file_is_converted_once_and_again_when_it_changes(tiny_llama, recipe, tmp_path):
    path = recipe(tiny_llama()).write(tmp_path / "m.gguf")
    reports: list[tuple[str, int, int]] = []
    first = resolve(str(path), cache_dir=tmp_path / "cache", progress=lambda *report: reports.append(report))
    assert reports[-1][1] == reports[-1][2] > 0
    reports.clear()
    assert (
        resolve(str(path), cache_dir=tmp_path / "cache", progress=lambda *report: reports.append(report))
        == first
    )
    assert not reports
    recipe(tiny_llama(num_hidden_layers=1)).write(path)
    second = converted(path)
    assert second != first
    assert config_of(second)["num_hidden_layers"] == 1


def test_local_folders_are_taken_as_they_are_and_other_names_refused(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match=r"without config\.json"):
        resolve(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text("{}")
    assert resolve(str(tmp_path / "model")) == tmp_path / "model"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        resolve(str(tmp_path / "notes.txt"))
    for name in (
        "/no/such/folder",
        "./model",
        "nothing.gguf",
        "a/b/c",
        "org/model.gguf",
        "",
        " ",
        "~nobody-of-this-name/x",
    ):
        with pytest.raises(CheckpointError, match="no file or folder"):
            resolve(name)


def test_conversion_imports_no_torch(tiny_llama, recipe, tmp_path):
    path = recipe(tiny_llama()).write(tmp_path / "m.gguf")
    script = (
        "import sys; from pathlib import Path; from heddle.core.checkpoint import resolve;"
        f"resolve({str(path)!r}, cache_dir=Path({str(tmp_path / 'cache')!r}));"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# ------------------------------------------------------------------ tokenizers

TEXTS = [
    "hello world",
    "  hello   world\n\n and\tthe rest  ",
    "don't they'll THEY'LL x",
    "größer schön 世界 😀",
    "12345 and 7",
    "<s>hello</s> world",
    "a_b-c--d ... !?",
]


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_tokenizers_encode_as_in_transformers(tiny_llama, recipe, tmp_path, pre):
    from transformers import AutoTokenizer

    path = recipe(tiny_llama(), metadata={"tokenizer.ggml.pre": pre}).write(tmp_path / "m.gguf")
    tokenizer = Tokenizer.load(converted(path))
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        token_ids = expected.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids
        assert tokenizer.decode(token_ids) == expected.decode(token_ids, skip_special_tokens=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    # llama.cpp begins texts of these two with the begin token unless the file says otherwise
    assert (tokenizer.encode("hello")[0] == 1) == (pre in ("llama-bpe", "tekken"))


def test_vocabularies_with_single_digits_cut_every_digit_off_first(tiny_llama, recipe, tmp_path):
    """By hand: spaces before a digit stay together, where GPT-2's split would leave one to the digit."""
    made = recipe(tiny_llama(), metadata={"tokenizer.ggml.pre": "smollm"})
    tokenizer = Tokenizer.load(converted(made.write(tmp_path / "m.gguf")))
    pieces = [tokenizer.token_text(token) for token in tokenizer.encode("of  42\n\n7")]
    assert pieces[-2:] == ["\n\n", "7"]
    assert pieces[-5:-2] == ["  ", "4", "2"]


@pytest.mark.parametrize("add", [None, True, False])
def test_the_file_says_whether_a_text_begins_with_the_begin_token(tiny_llama, recipe, tmp_path, add):
    metadata = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": add}
    tokenizer = Tokenizer.load(converted(recipe(tiny_llama(), metadata=metadata).write(tmp_path / "m.gguf")))
    assert tokenizer.encode("hello").count(1) == (0 if add is False else 1)


def test_the_chat_template_comes_along(tiny_llama, recipe, tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}|"
    path = recipe(tiny_llama(), metadata={"tokenizer.chat_template": template}).write(tmp_path / "m.gguf")
    assert Tokenizer.load(converted(path)).render_chat([{"role": "user", "content": "hi"}]) == "<s>hi|"


def test_a_sentencepiece_vocabulary_encodes_as_sentencepiece_does(
    tiny_llama, recipe, sentencepiece_model, tmp_path
):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    size = processor.vocab_size()
    kinds = []
    for index in range(size):
        byte, control = processor.is_byte(index), processor.is_control(index)
        kinds.append(2 if processor.is_unknown(index) else 3 if control else 6 if byte else 1)
    vocabulary = {
        "model": "llama",
        "tokens": [processor.id_to_piece(index) for index in range(size)],
        "scores": [processor.get_score(index) for index in range(size)],
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    model = tiny_llama(vocab_size=size)
    tokenizer = Tokenizer.load(converted(recipe(model, tokenizer=vocabulary).write(tmp_path / "m.gguf")))
    for text in [*TEXTS[:5], TEXTS[6], "the the  theory of hello-world"]:
        assert tokenizer.encode(text) == [1, *processor.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    vocabulary |= {"add_space_prefix": False, "add_bos_token": False}
    plain = Tokenizer.load(converted(recipe(model, tokenizer=vocabulary).write(tmp_path / "n.gguf")))
    assert plain.encode(" hello world") == processor.encode("hello world")  # whose own first piece is "▁"
    assert plain.decode(plain.encode("hello")) == "hello"
