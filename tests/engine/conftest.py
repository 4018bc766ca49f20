"""A tiny random LLaMA with a byte tokenizer, PEFT adapters of many ranks on it, and one LLM over all of
them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from heddle import LLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "r1": (1, ["q_proj"]),
    "r4": (4, ["q_proj", "v_proj"]),
    "r5": (5, ALL_MODULES),
    "r8": (8, ["gate_proj", "up_proj", "down_proj"]),
    "r16": (16, ["k_proj", "o_proj", "down_proj"]),
    "r64": (64, ALL_MODULES),
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab 258 (256 bytes, <s>, </s>), hidden 32, 2 layers, GQA; weights large enough for clear
    preferences."""
    folder = tmp_path_factory.mktemp("base")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {letter: index + 2 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    wrapped.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders written by PEFT; A and B random, so that every delta is far from zero."""
    folders = {}
    for seed, (name, (rank, modules)) in enumerate(ADAPTERS.items()):
        torch.manual_seed(100 + seed)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, task_type="CAUSAL_LM")
        model = peft.get_peft_model(_load(base), config)
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.3 / rank**0.5)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


Reference = Callable[[str | None], Any]


@pytest.fixture(scope="session")
def reference(base: Path, adapters: dict[str, Path]) -> Reference:
    """The model as transformers and PEFT run it, by adapter name; None: the base."""

    @functools.cache
    def model(adapter: str | None) -> Any:
        plain = _load(base)
        return plain if adapter is None else peft.PeftModel.from_pretrained(plain, adapters[adapter]).eval()

    return model


def _load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


Start = Callable[..., LLM]


@pytest.fixture(scope="session")
def start(base: Path, adapters: dict[str, Path]) -> Iterator[Start]:
    """Starts an LLM with all adapters and checked invariants; keyword arguments change its settings."""
    started = []

    def llm(**settings: Any) -> LLM:
        defaults = {"pool_memory": 2 << 20, "check_invariants": True, "num_threads": 1, "adapters": adapters}
        started.append(LLM(settings.pop("model", base), **(defaults | settings)))
        return started[-1]

    yield llm
    for one in started:
        one.close()


@pytest.fixture(scope="session")
def llm(start: Start) -> LLM:
    """The one that most tests share: block ids shuffled, every free block full of NaN before each step."""
    return start()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Sixteen of 1 to 61 tokens: under, at and over multiples of the block size 16."""
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 5, 48, 61, 8, 20, 3, 40, 64]
    return [torch.randint(2, 258, (length,), generator=generator).tolist() for length in lengths]
