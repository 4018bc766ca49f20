"""An adapter's own tokenizer and chat template: ignored, and the receipt names what of them differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from heddle.lora.base import BaseModel
from heddle.lora.errors import AdapterInvalid
from heddle.lora.inspect import inspect

from .peft_adapters import AdapterFolder, base_of

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
VOCABULARY = {"a": 0, "b": 1, '"\\': 2, "</s>": 3}
"""The base's; its embedding has 64 rows."""


def write_tokenizer(folder: Path, added: dict[str, int] | None = None, **config: Any) -> None:
    tokens = [
        {"id": id, "content": text, "special": True} for text, id in {"</s>": 3, **(added or {})}.items()
    ]
    model = {"type": "BPE", "vocab": VOCABULARY, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": model}))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    (tmp_path / "base").mkdir()
    write_tokenizer(tmp_path / "base")
    return msgspec.structs.replace(base_of(2), folder=str(tmp_path / "base"))


def warnings(adapter: AdapterFolder, base: BaseModel) -> list[str]:
    return inspect(adapter.path, base, max_rank=64, max_bytes=1 << 20).warnings


def test_copies_of_the_bases_files_are_no_news(qv: AdapterFolder, base: BaseModel) -> None:
    quiet = warnings(qv, base)
    write_tokenizer(qv.path)
    assert warnings(qv, base) == quiet


def test_another_chat_template_is_named_in_a_warning(qv: AdapterFolder, base: BaseModel) -> None:
    quiet = warnings(qv, base)
    write_tokenizer(qv.path, chat_template="{{ cycler.__init__.__globals__ }}")
    (note,) = warnings(qv, base)[len(quiet) :]
    assert "chat template (tokenizer_config.json) differs and is ignored" in note
    (qv.path / "chat_template.jinja").write_text(TEMPLATE)  # the file counts before the setting
    assert warnings(qv, base) == quiet
    (qv.path / "chat_template.jinja").write_text("{{ x }}")
    assert "chat template (chat_template.jinja)" in warnings(qv, base)[-1]


def test_a_template_that_the_base_has_none_of_says_that_chats_are_refused(
    qv: AdapterFolder, base: BaseModel
) -> None:
    assert base.folder is not None
    write_tokenizer(Path(base.folder), chat_template=None)
    write_tokenizer(qv.path)
    assert "the base has none, so chats are refused" in warnings(qv, base)[-1]


def test_an_added_token_inside_the_vocabulary_is_named_in_a_warning(
    qv: AdapterFolder, base: BaseModel
) -> None:
    write_tokenizer(qv.path, {"<tool>": 63})
    assert "adds '<tool>' as 63: the base's tokenizer is used" in warnings(qv, base)[-1]


def test_a_tokenizer_with_more_ids_than_the_base_has_rows_is_refused_with_both_sizes(
    qv: AdapterFolder, base: BaseModel
) -> None:
    for grown in (base, base_of(2)):
        write_tokenizer(qv.path, {f"<{id}>": id for id in range(64, 72)})
        with pytest.raises(AdapterInvalid, match=r"72 rows, and the base has 64"):
            warnings(qv, grown)
    words = {"model": {"type": "BPE", "vocab": {**VOCABULARY, "x": 71}, "merges": []}}
    (qv.path / "tokenizer.json").write_text(json.dumps(words, indent=1))
    with pytest.raises(AdapterInvalid, match=r"72 rows, and the base has 64"):
        warnings(qv, base)


def test_a_token_that_the_base_has_as_a_word_is_no_news(qv: AdapterFolder, base: BaseModel) -> None:
    quiet = warnings(qv, base)
    write_tokenizer(qv.path, {"b": 1})
    notes = warnings(qv, base)[len(quiet) :]
    assert notes == ["the base's tokenizer and chat template are used; ignored: tokenizer.json"]


def test_another_end_token_is_named_in_a_warning(qv: AdapterFolder, base: BaseModel) -> None:
    write_tokenizer(qv.path, eos_token={"content": "<|eot|>"})
    assert warnings(qv, base)[-1] == "its own eos_token '<|eot|>' is ignored: the base's is '</s>'"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"added_tokens": 5}', "[" * 100_000, '{"model": {"vocab": [1]}}']
)
def test_files_that_cannot_be_read_are_ignored_all_the_same(
    qv: AdapterFolder, base: BaseModel, text: str
) -> None:
    (qv.path / "tokenizer.json").write_text(text)
    (qv.path / "tokenizer_config.json").write_text(text)
    assert (
        warnings(qv, base)[-1] == "the base's tokenizer and chat template are used; ignored: tokenizer.json"
    )


def test_without_the_bases_files_everything_is_named(qv: AdapterFolder) -> None:
    write_tokenizer(qv.path)
    assert "ignored: tokenizer.json, tokenizer_config.json" in warnings(qv, base_of(2))[-1]
