"""Token ids by a model folder's own files: which ones end an answer, which vocabulary it is. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from .json_file import ModelError, read_json


def end_token_ids(folder: Path, configured: object, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends an answer, ascending.

    They come from config.json (`configured`), generation_config.json and the tokenizer's own `eos_token`.
    An id outside the vocabulary can never be generated and is left out. Raises ModelError for what is no id.
    """
    ids = set(_ids(configured, "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids.update(_ids(read_json(generation).get("eos_token_id"), "generation_config.json"))
    own = _tokenizer_end(folder)
    if own is not None:
        ids.add(own)
    return tuple(sorted(token for token in ids if token < vocab_size))


def vocabulary_digest(folder: Path, identity: bytes) -> str:
    """`sha256:` over `identity` and tokenizer.json's ids (not its bytes: saving again may reorder them)."""
    digest = hashlib.sha256(identity)
    path = folder / "tokenizer.json"
    if path.is_file():
        values = read_json(path)
        model = values.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        added = [(token.get("id"), token.get("content")) for token in _objects(values.get("added_tokens"))]
        digest.update(msgspec.json.encode([vocabulary, added], order="sorted"))
    elif (folder / "tokenizer.model").is_file():
        digest.update((folder / "tokenizer.model").read_bytes())
    return f"sha256:{digest.hexdigest()}"


def _ids(value: object, where: str) -> list[int]:
    """An `eos_token_id`: null, one id, or a list of ids. -1, which old configs write for "none", is none."""
    values: list[Any] = value if isinstance(value, list) else [value]
    for token in values:
        if token is not None and (type(token) is not int or token < -1):
            raise ModelError(f"{where}: eos_token_id must be a token id or a list of them, got {value!r}")
    return [token for token in values if token is not None and token >= 0]


def _tokenizer_end(folder: Path) -> int | None:
    """The id of the tokenizer's own `eos_token`, looked up by its text."""
    config_path, path = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not config_path.is_file():
        return None
    config = read_json(config_path)
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    decoder = config.get("added_tokens_decoder")
    for key, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal():
            return int(key)
    if not path.is_file():
        return None
    values = read_json(path)
    for entry in _objects(values.get("added_tokens")):
        if entry.get("content") == text and type(entry.get("id")) is int:
            return int(entry["id"])
    model = values.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return found if type(found) is int else None


def _objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
