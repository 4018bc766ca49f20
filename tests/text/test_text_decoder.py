"""Tokens to text: one at a time gives what decoding them all at once gives."""

from __future__ import annotations

import pytest
from heddle.core.text.detokenizer import token_texts
from heddle.core.text.text_decoder import ByteLevelDecoder, PieceDecoder, WindowDecoder
from heddle.core.text.tokenizer import Tokenizer
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st


def pieces_of(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    decoder = tokenizer.text_decoder(prompt)
    return [piece for token in output for piece in decoder.push(token)] + decoder.flush()


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer._backend.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def test_each_kind_of_vocabulary_gets_its_own_decoder(
    byte_level_tokenizer, piece_tokenizer, unigram_tokenizer, word_tokenizer
):
    assert isinstance(byte_level_tokenizer.text_decoder([]), ByteLevelDecoder)
    assert isinstance(piece_tokenizer.text_decoder([]), PieceDecoder)
    assert isinstance(unigram_tokenizer.text_decoder([]), WindowDecoder)
    assert isinstance(word_tokenizer.text_decoder([]), WindowDecoder)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_pieces_are_the_decoded_output_for_random_tokens(any_tokenizer, data):
    tokenizer = any_tokenizer
    tokens = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24)
    prompt, output = data.draw(tokens), data.draw(tokens)
    assume("<0x20>" not in map(tokenizer._backend.id_to_token, prompt))  # stripped when it comes first
    backend = tokenizer._backend
    before = backend.decode(prompt, skip_special_tokens=True)
    whole = backend.decode(prompt + output, skip_special_tokens=True)
    assume(whole.startswith(before))  # else "without the prompt's text" says nothing
    pieces = pieces_of(tokenizer, prompt, output)
    assert "".join(pieces) == whole[len(before) :]
    assert len(pieces) == len(output)


@settings(max_examples=150, deadline=None)
@given(prompt=st.binary(max_size=6), output=st.binary(max_size=10))
@example(prompt=b"\xed\xa0", output=b"")  # half of a surrogate pair: broken at its second byte already
@example(prompt=b"a", output=b"\xf4\x90\x80\x80\xe0\x80\xc1\xf5")
def test_bytes_of_any_kind_decode_as_the_reference_does(
    piece_tokenizer, byte_level_tokenizer, prompt, output
):
    """Random bytes are mostly broken characters: the hardest input for both kinds of byte tokens."""
    alphabet = {value: key for key, value in byte_level_tokenizer._byte_of.items()}
    for tokenizer, name in (
        (piece_tokenizer, lambda byte: f"<0x{byte:02X}>"),
        (byte_level_tokenizer, lambda byte: alphabet[byte]),
    ):
        before_ids = ids(tokenizer, "a", *map(name, prompt))
        output_ids = ids(tokenizer, *map(name, output))
        before, whole = tokenizer.decode(before_ids), tokenizer.decode(before_ids + output_ids)
        if whole.startswith(before):
            assert "".join(pieces_of(tokenizer, before_ids, output_ids)) == whole[len(before) :]


@pytest.mark.parametrize("kind", ["byte_level", "piece"])
def test_a_character_over_several_tokens_is_one_piece_of_the_token_that_ends_it(kind, request):
    tokenizer = request.getfixturevalue(f"{kind}_tokenizer")
    if kind == "piece":
        output = ids(tokenizer, *(f"<0x{byte:02X}>" for byte in "😀世".encode()), "a")
    else:
        alphabet = {value: key for key, value in tokenizer._byte_of.items()}
        output = ids(tokenizer, *(alphabet[byte] for byte in "😀世".encode()), "a")
    assert pieces_of(tokenizer, [], output) == ["", "", "", "😀", "", "", "世", "a"]


def test_a_character_over_several_tokens_in_mid_token(byte_level_tokenizer):
    """The real vocabulary has tokens such as " \\xf0\\x9f\\x98"."""
    tokenizer = byte_level_tokenizer
    decoder = ByteLevelDecoder([b" a\xf0\x9f", b"\x98", b"\x80b"].__getitem__, [])
    assert [decoder.push(0), decoder.push(1), decoder.push(2)] == [[], [" a"], ["", "😀b"]]
    assert decoder.flush() == []
    assert tokenizer.token_bytes(10**9) == b""


def test_a_character_begun_in_the_prompt_is_ended_in_the_output(piece_tokenizer, byte_level_tokenizer):
    prompt = ids(piece_tokenizer, "<s>", "a", "<0xE4>", "<0xB8>")
    assert pieces_of(piece_tokenizer, prompt, ids(piece_tokenizer, "<0x96>", "a")) == ["世", "a"]
    decoder = ByteLevelDecoder([b"a\xe4\xb8", b"\x96", b"b"].__getitem__, [0])
    assert decoder.push(1) + decoder.push(2) + decoder.flush() == ["世", "b"]


def test_the_space_before_a_word_is_kept_and_not_trimmed_twice(piece_tokenizer):
    """The prompt is "Hello"; the text goes on with the space that "▁world" brings."""
    hello = ids(piece_tokenizer, "<s>", "▁Hello")
    assert pieces_of(piece_tokenizer, hello, ids(piece_tokenizer, "▁world")) == [" world"]
    assert pieces_of(piece_tokenizer, hello, ids(piece_tokenizer, "▁", "▁x")) == [" ", " x"]
    assert pieces_of(
        piece_tokenizer, ids(piece_tokenizer, "<s>"), ids(piece_tokenizer, "▁Hello", "▁world")
    ) == [
        "Hello",
        " world",
    ]


def test_special_tokens_are_no_text_wherever_they_stand(any_tokenizer):
    special = ids(any_tokenizer, "<s>", "</s>")
    assert all(any_tokenizer.is_special(token) for token in special)
    assert pieces_of(any_tokenizer, special, special) == ["", ""]


def test_an_endless_run_of_one_byte_costs_a_constant_for_each_token(piece_tokenizer):
    """Seen when a model is stuck: nothing may decode everything again for each new token."""
    token = ids(piece_tokenizer, "<0xF0>")[0]
    counted = []
    original = piece_tokenizer._rules.piece

    class Rules:
        strip_char, strip_count = " ", 1

    decoder = PieceDecoder(Rules, lambda id: counted.append(id) or original("<0xF0>"), [])  # type: ignore[arg-type]
    for _ in range(5000):
        assert decoder.push(token) == []
    assert len(decoder.flush()) == 5000
    assert len(counted) == 5000


def test_offsets_of_a_whole_text_count_its_characters(byte_level_tokenizer):
    text = "Paris 😀 世!"
    token_ids = byte_level_tokenizer.encode(text)
    texts = token_texts(byte_level_tokenizer, token_ids)
    assert len(texts) == len(token_ids)
    assert "".join(entry.text for entry in texts) == text
    assert all(text[entry.offset :].startswith(entry.text) for entry in texts)
