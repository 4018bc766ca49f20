"""Tiny models as GGUF files, and a hub that speaks the few endpoints a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, module = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[module]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: the halves of each head alternate."""
    rows = np.arange(values.shape[0]).reshape(heads, 2, -1)
    return values[rows.transpose(0, 2, 1).ravel()]


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and token types of a small byte-level BPE vocabulary with three control tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        "hello world, the 2nd of 10 words    42\n\n7 tests",
        "größer schön  don't they'll 世界",
        "of  ",
        "of\n\n",
    ] * 3
    backend.train_from_iterator(corpus, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    return tokens, merges, [3 if token in ("<unk>", "<s>", "</s>") else 1 for token in tokens]


@dataclass
class GgufRecipe:
    """A `transformers` model written as a GGUF file; every part can be spoiled before `write`."""

    model: Any
    architecture: str = "llama"
    types: Callable[[str], str] = lambda name: "F32"
    metadata: dict[str, Any] = field(default_factory=dict)
    """Added to the usual keys, or replacing them; None leaves one out."""
    tokenizer: dict[str, Any] | None = None
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)

    def write(self, path: Path) -> Path:
        import gguf

        config = self.model.config
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self._metadata(config).items():
            if value is None:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            else:
                writer.add_string(key, value)
        tensors = {}
        for name, weight in self.model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            values = weight.float().numpy()
            if self.architecture == "llama" and ".q_proj." in name:
                values = interleaved(values, config.num_attention_heads)
            if self.architecture == "llama" and ".k_proj." in name:
                values = interleaved(values, config.num_key_value_heads)
            tensors[gguf_name(name)] = values
        for name, values in {**tensors, **self.extra}.items():
            if name in self.without:
                continue
            kind = gguf.GGMLQuantizationType[self.types(name) if values.ndim == 2 else "F32"]
            data = gguf.quantize(values, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _metadata(self, config: Any) -> dict[str, Any]:
        if self.tokenizer is None:
            tokens, merges, types = byte_level_vocabulary(config.vocab_size)
            self.tokenizer = {
                "model": "gpt2",
                "pre": "gpt-2",
                "tokens": tokens,
                "merges": merges,
                "token_type": types,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "unknown_token_id": 0,
            }
        name = self.architecture
        usual = {
            f"{name}.vocab_size": config.vocab_size,
            f"{name}.block_count": config.num_hidden_layers,
            f"{name}.context_length": config.max_position_embeddings,
            f"{name}.embedding_length": config.hidden_size,
            f"{name}.feed_forward_length": config.intermediate_size,
            f"{name}.attention.head_count": config.num_attention_heads,
            f"{name}.attention.head_count_kv": config.num_key_value_heads,
            f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{name}.rope.freq_base": 10000.0,
            "general.name": "tiny",
        }
        if config.model_type == "llama":
            usual[f"{name}.attention.key_length"] = config.head_dim
            usual[f"{name}.attention.value_length"] = config.head_dim
            usual[f"{name}.rope.dimension_count"] = config.head_dim
        usual |= {
            f"tokenizer.ggml.{key}": value for key, value in self.tokenizer.items() if key != "chat_template"
        }
        if "chat_template" in self.tokenizer:
            usual["tokenizer.chat_template"] = self.tokenizer["chat_template"]
        return usual | self.metadata


@pytest.fixture
def tiny_llama() -> Callable[..., Any]:
    """`tiny_llama(**config)`: a random LLaMA of two layers with 320 tokens."""

    def make(**changes: Any) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        settings = {
            "vocab_size": 320,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        return model.eval()

    return make


@pytest.fixture
def recipe() -> type[GgufRecipe]:
    return GgufRecipe


# ------------------------------------------------------------------ a hub


@dataclass
class Hub:
    """A stand-in for a model hub: repositories as files in memory, and what went over the wire."""

    endpoint: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range header)."""
    break_after: dict[str, int] = field(default_factory=dict)
    """File name -> bytes after which its next download is cut off, once."""
    refuse: bool = False
    """Answer everything with 503."""
    refuse_after_break: bool = False

    def sha(self, repository: str) -> str:
        return hashlib.sha1(repository.encode()).hexdigest()

    def downloads(self, name: str) -> list[str | None]:
        """The Range headers of the downloads of a file."""
        return [
            ranges for method, path, ranges in self.requests if method == "GET" and path.endswith(f"/{name}")
        ]


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range")))
            if hub.refuse:
                return self.send(503, b"", {})
            parts = path.strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            repository = "/".join(parts[2:4] if api else parts[:2])
            files = hub.repositories.get(repository)
            if files is None:
                return self.send(
                    404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                )
            if repository in hub.gated and "Authorization" not in self.headers and not api:
                return self.send(401, b"{}", {"X-Error-Code": "GatedRepo"})
            sha = hub.sha(repository)
            rest = parts[4:] if api else parts[2:]
            if len(rest) > 1 and rest[1] not in ("main", "v1", sha):
                return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            if api and rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return self.send_json(entries)
            if api:
                siblings = [{"rfilename": name} for name in files]
                return self.send_json({"id": repository, "sha": sha, "siblings": siblings, "private": False})
            name = "/".join(rest[2:])
            if name not in files:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            data, status = files[name], 200
            headers = {
                "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                "X-Repo-Commit": sha,
                "Accept-Ranges": "bytes",
            }
            if ranges := self.headers.get("Range"):
                start = int(ranges.removeprefix("bytes=").split("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                data, status = data[start:], 206
            self.send(
                status, data, headers, hub.break_after.pop(name, None) if self.command == "GET" else None
            )

        def send_json(self, content: Any) -> None:
            self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def send(self, status: int, data: bytes, headers: dict[str, str], cut: int | None = None) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True
                hub.refuse = hub.refuse_after_break

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running hub, which HF_ENDPOINT points to."""
    stand_in = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stand_in))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stand_in.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", stand_in.endpoint)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield stand_in
    server.shutdown()
    server.server_close()
    thread.join()


# ------------------------------------------------------------------ SentencePiece

SENTENCES = [
    "hello world, this is the theory of the other thing, and there they are",
    "the quick brown fox jumps over the lazy dog in 10 or 20 steps",
    "größer und schöner als die anderen 世界 你好",
]


def train_model(folder: Path, **changes: Any) -> Path:
    """A SentencePiece model, by default of the kind that Llama 2 has."""
    import sentencepiece

    (folder / "corpus.txt").write_text("\n".join(SENTENCES * 30))
    settings = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "hard_vocab_limit": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "trained"),
        minloglevel=2,
        num_threads=1,
        **{**settings, **changes},
    )
    return folder / "trained.model"


@pytest.fixture(scope="session")
def train_sentencepiece() -> Callable[..., Path]:
    return train_model


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("sentencepiece"))
