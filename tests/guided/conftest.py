"""A tiny random LLaMA whose words are BPE tokens of several bytes: what it says is noise, unless a grammar guides
it. Servers with a stub engine over the same tokenizer and several chat templates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from heddle.core.engine.grammars import Guide
from heddle.core.text.grammar import GrammarCompiler
from heddle.core.text.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..api.conftest import RunningServer, running

SPECIAL = ["<s>", "</s>", "<|im_end|>", "<|python_tag|>", "[TOOL_CALLS]"]
END_IDS = [1, 2]
VOCAB = 520
"""More rows than the tokenizer has tokens, as padded embeddings have."""
CORPUS = [
    'The quick brown fox said: {"name": "Ada Lovelace", "age": 36, "tags": ["poetry", "mathematics"]}',
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>',
    "größer, schön; 世界 你好; emoji 😀 2024-02-29T12:00:00Z yes no maybe 0123456789 true false null",
] * 8

HERMES = """{%- if tools %}<s>Functions: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for m in messages %}<s>{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ '</s>' }}{% endfor %}
{%- if add_generation_prompt %}<s>assistant: {% endif %}"""
MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- c.function | tojson }}{% endfor %}]{% else %}{{ m.content }}{% endif %}{% endfor %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{%- for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: """
MISTRAL_NAMED = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
FUNCTIONS = """{% if tools %}Reply in the format <function=example_name>{"example": "value"}</function>
{%- for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: """
UNKNOWN = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
NO_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"$ref": "#/$defs/zone"}},
            "required": ["zone"],
            "additionalProperties": False,
            "$defs": {"zone": {"type": "integer", "minimum": -12, "maximum": 14}},
        },
    },
}


def write_base(folder: Path, template: str) -> Path:
    """Config and tokenizer, without weights."""
    folder.mkdir(parents=True)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    assert backend.get_vocab_size() < VOCAB
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_IDS}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With random weights, so large that the model has clear preferences; they are for anything but JSON."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = write_base(tmp_path_factory.mktemp("guided") / "tiny", HERMES)
    settings = json.loads((folder / "config.json").read_text())
    torch.manual_seed(3)
    known = LlamaConfig(**{key: settings[key] for key in settings if key != "architectures"})
    known.initializer_range = 0.3
    LlamaForCausalLM(known).save_pretrained(folder / "weights")
    (folder / "weights" / "model.safetensors").rename(folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("tokenizer") / "tiny", HERMES)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, END_IDS)


@pytest.fixture(scope="session")
def walk(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Walk:
    """A text drawn from a grammar, each allowed token as likely as any; None where it grows too long."""

    def draw(grammar: str, seed: int, longest: int = 400) -> str | None:
        guide, draws, tokens = Guide(compiler.compile(grammar), VOCAB), random.Random(seed), []
        while len(tokens) < longest:
            allowed = np.flatnonzero(guide.allowed(tokens))
            # Ends, brackets and quotes more often, or hardly any text would ever be complete.
            closing = [
                t for t in allowed if t in END_IDS or tokenizer.token_bytes(int(t)) in (b'"', b"}", b"]")
            ]
            token = int(draws.choice(closing if closing and draws.random() < 0.3 else list(allowed)))
            if token in END_IDS:
                break
            tokens.append(token)
            if guide.take(token):
                break
        else:
            return None
        return b"".join(tokenizer.token_bytes(token) for token in tokens).decode()

    return draw


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether `text` may be an answer."""
    guide, tokens = Guide(compiler.compile(grammar), VOCAB), tokenizer.encode(text, add_special_tokens=False)
    for index, token in enumerate(tokens):
        if not guide.allowed(tokens[:index])[token]:
            return False
        if guide.take(token):
            return index + 1 == len(tokens)
    return bool(guide.allowed(tokens)[END_IDS].any())


Walk = Callable[..., str | None]
Serve = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`serve(template)`: a server with a stub engine."""

    @contextmanager
    def start(template: str = HERMES) -> Iterator[RunningServer]:
        with running(tmp_path, write_base(tmp_path / "base", template), max_model_len=1024) as server:
            server.engine.end_token = END_IDS[0]
            yield server

    return start


@pytest.fixture(scope="module")
def hermes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("hermes")
    with running(home, write_base(home / "base", HERMES), max_model_len=1024) as started:
        yield started


@pytest.fixture
def server(hermes_server: RunningServer) -> RunningServer:
    """Its engine says what it is given: `say(server, text)`."""
    hermes_server.engine.reset()
    hermes_server.engine.end_token = END_IDS[0]
    return hermes_server


def say(server: RunningServer, tokenizer: Tokenizer, text: str, burst: int = 1) -> None:
    """From now on the stub engine answers with the tokens of `text`."""
    server.engine.script = tokenizer.encode(text, add_special_tokens=False)  # type: ignore[assignment]
    server.engine.burst = burst


def refusal(answer: Any, param: str) -> str:
    """The message of a request refused for `param`."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "invalid_request"
    assert error["param"] == param
    return error["message"]
