"""The tokenizer reads a model folder as transformers does, and begins a text once."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from heddle.core.text.tokenizer import Tokenizer, TokenizerError
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

TEXTS = [
    "",
    " ",
    "Hello world!",
    "  two  spaces\n\nand lines\t",
    "größer 世界 😀",
    "1234 and 5",
    "<s>already begun",
    "in </s> between",
    "é́ \r\n x",
]


def reference(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["byte-level", "byte-level-bos", "pieces", "unigram", "words"])
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_encodings_equal_those_of_transformers(model_folder, kind, add_bos):
    folder = model_folder(kind, add_bos_token=add_bos)
    expected, tokenizer = reference(folder), Tokenizer.load(folder)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == expected.encode(
            text, add_special_tokens=False
        )
        if not text.startswith("<s>"):
            assert tokenizer.encode(text) == expected.encode(text)
        token_ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(token_ids, skip) == expected.decode(token_ids, skip_special_tokens=skip)


def test_a_text_that_begins_with_the_begin_token_gets_no_second_one(model_folder):
    tokenizer = Tokenizer.load(model_folder("byte-level-bos"))
    assert tokenizer.bos_token_id == 1
    plain = tokenizer.encode("fox")
    assert plain[0] == 1
    assert tokenizer.encode("<s>fox") == plain
    assert tokenizer.encode("<s><s>fox") == [1, *plain]
    assert tokenizer.encode("fox", add_special_tokens=False) == plain[1:]
    assert tokenizer.encode("<s>") == [1]
    assert tokenizer.encode("") == [1]


def test_a_tokenizer_without_a_begin_token_adds_none(model_folder):
    tokenizer = Tokenizer.load(model_folder("byte-level"))
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<s>fox")[0] == 1
    assert tokenizer.encode("fox")[0] != 1


@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_chat_has_exactly_the_begin_tokens_that_its_template_writes(model_folder, writes_bos):
    template = (
        "{{ bos_token }}" if writes_bos else ""
    ) + "{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = model_folder("byte-level-bos", chat_template=template)
    tokenizer, messages = Tokenizer.load(folder), [{"role": "user", "content": "fox"}]
    token_ids = tokenizer.encode_chat(messages)
    assert token_ids.count(1) == int(writes_bos)
    assert token_ids == reference(folder).apply_chat_template(messages, tokenize=True)["input_ids"]
    assert tokenizer.encode(tokenizer.render_chat(messages)).count(1) == 1


def test_special_tokens_named_only_in_the_configuration_are_special(model_folder):
    pad = {"__type": "AddedToken", "content": "two", "lstrip": False, "rstrip": False, "normalized": False}
    folder = model_folder("words", pad_token=pad, additional_special_tokens=["three"])
    tokenizer, expected = Tokenizer.load(folder), reference(folder)
    token_ids = tokenizer.encode("one two three")
    assert token_ids == expected.encode("one two three")
    assert tokenizer.decode(token_ids) == expected.decode(token_ids, skip_special_tokens=True) == "one"


def test_special_tokens_come_from_the_older_file_too(model_folder):
    folder = model_folder("words", bos_token=None, eos_token=None)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_a_special_token_that_the_vocabulary_lacks_gets_no_id(model_folder):
    """It would lie beyond the model's embedding."""
    folder = model_folder("byte-level", pad_token="[PAD]", additional_special_tokens=["<|extra|>"])
    plain = Tokenizer.load(model_folder("byte-level")).vocab_size
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == plain
    assert max(tokenizer.encode("a [PAD] <|extra|>")) < plain


def test_truncation_and_padding_of_the_file_are_not_applied(model_folder):
    folder = model_folder("byte-level")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("Hello world!")) == "Hello world!"
    assert 0 not in tokenizer.encode("Hello")


def test_bytes_of_tokens_join_to_the_text(byte_level_tokenizer, piece_tokenizer):
    text = "größer 世界 😀!"
    token_ids = byte_level_tokenizer.encode(text)
    assert b"".join(map(byte_level_tokenizer.token_bytes, token_ids)) == text.encode()
    token = piece_tokenizer._backend.token_to_id
    assert piece_tokenizer.token_bytes(token("<0xE4>")) == b"\xe4"
    assert piece_tokenizer.token_bytes(token("▁world")) == b" world"
    assert piece_tokenizer.token_bytes(token("世")) == "世".encode()
    assert piece_tokenizer.token_bytes(1) == b"<s>"


def test_a_token_that_is_part_of_a_character_is_shown_by_its_bytes(piece_tokenizer, byte_level_tokenizer):
    token = piece_tokenizer._backend.token_to_id
    assert piece_tokenizer.token_text(token("<0xE4>")) == "bytes:\\xe4"
    assert piece_tokenizer.token_text(token("<0x41>")) == "A"
    assert piece_tokenizer.token_text(token("▁world")) == " world"
    assert byte_level_tokenizer.token_text(byte_level_tokenizer._backend.token_to_id("ð")) == "bytes:\\xf0"


def test_every_token_of_any_vocabulary_has_a_text(any_tokenizer):
    texts = [any_tokenizer.token_text(token) for token in range(any_tokenizer.vocab_size)]
    assert all(isinstance(text, str) for text in texts)
    assert texts[1] == "<s>"


def test_ids_outside_the_vocabulary_have_no_text(any_tokenizer):
    size = any_tokenizer.vocab_size
    for token in (-1, size, 2**31, 2**40):
        assert any_tokenizer.decode([token]) == ""
        assert any_tokenizer.token_text(token) == ""
        assert any_tokenizer.token_bytes(token) == b""
    decoder = any_tokenizer.text_decoder([size, -1])
    assert [*decoder.push(size), *decoder.flush()] == [""]


def test_threads_share_one_tokenizer(byte_level_tokenizer):
    texts = [f"{text} {n}" for text, n in itertools.product(TEXTS, range(20))]
    expected = [byte_level_tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(byte_level_tokenizer.encode, texts)) == expected


def test_missing_or_broken_tokenizer_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_configuration_is_named(model_folder):
    folder = model_folder("words")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json must hold"):
        Tokenizer.load(folder)


def test_a_template_with_a_syntax_error_is_an_error_at_start(model_folder):
    with pytest.raises(TokenizerError, match="syntax error in line 2"):
        Tokenizer.load(model_folder("words", chat_template="a\n{% for %}"))


def test_no_heavy_package_is_imported(model_folder):
    """The server process holds the tokenizer; it must stay small."""
    folder = model_folder("pieces", chat_template="{{ messages[0].content }}")
    script = (
        "import sys; from heddle.core.text.tokenizer import Tokenizer; import heddle.core.text.detokenizer;"
        f"t = Tokenizer.load({str(folder)!r}); t.encode_chat([{{'role': 'user', 'content': 'a'}}]);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_how_many_tokens_a_text_has_at_least_is_never_more_than_it_has():
    """Of byte-level BPE, and of SentencePiece's way; unknown where one token may swallow any number of characters."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {character: index for index, character in enumerate(sorted(alphabet))}
    merges = [("a", "a"), ("aa", "aa")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {}, None)
    assert tokenizer.at_least("a" * 4001) == 1001
    for text in ("a" * 4001, "", "aé😀" * 50, "b"):
        assert tokenizer.at_least(text) <= len(tokenizer.encode(text))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace("a", "aa")])
    assert Tokenizer(backend, {}, None).at_least("a" * 8) == 2
    for shortens in (normalizers.NFC(), normalizers.Replace("aa", ""), normalizers.Strip()):
        backend.normalizer = shortens
        assert Tokenizer(backend, {}, None).at_least("a" * 4001) == 0
    backend.normalizer = None
    backend.add_tokens([AddedToken("<gap>", rstrip=True)])
    assert Tokenizer(backend, {}, None).at_least("<gap>" + " " * 4000) == 0
    word = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    assert Tokenizer(word, {}, None).at_least("x" * 4000) == 0


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_worked_on(work, tmp_path: Path):
    """A server tokenises in threads so that its event loop goes on; a call that keeps the interpreter would stop it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {}, None)
    text = "some words of no great interest " * 50_000
    ids = tokenizer.encode(text)
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticking = threading.Thread(target=tick)
    ticking.start()
    time.sleep(0.05)
    began = time.perf_counter()
    if work == "encode":
        tokenizer.encode(text)
    else:
        tokenizer.decode(ids * 4)
    ended = time.perf_counter()
    over.set()
    ticking.join()
    during = [began, *(at for at in ticks if began < at < ended), ended]
    longest = max(after - before for before, after in itertools.pairwise(during))
    assert longest < (ended - began) / 2
