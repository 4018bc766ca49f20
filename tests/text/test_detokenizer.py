"""One sequence's text: streamed in any chunks it is the same, and nothing of a stop string is ever sent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from heddle.core.sampling_params import SamplingParams
from heddle.core.text.detokenizer import Detokenizer, TextDelta
from heddle.core.text.tokenizer import Tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st

EOS = frozenset({2})


def stream(
    tokenizer: Tokenizer,
    prompt: list[int],
    chunks: list[list[int]],
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    drop_last: bool = False,
) -> tuple[Detokenizer, list[TextDelta]]:
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(stop=stop, min_tokens=min_tokens), EOS)
    deltas = []
    for index, chunk in enumerate(chunks):
        last = index == len(chunks) - 1
        deltas.append(detokenizer.add(chunk, finished=last, drop_last=drop_last and last))
        if deltas[-1].stopped is not None:
            break
    return detokenizer, deltas


def singly(token_ids: list[int]) -> list[list[int]]:
    return [[token] for token in token_ids]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_chunks_and_stop_strings_give_the_decoded_text_cut_at_the_first_stop(any_tokenizer, data):
    """Oracle: decode everything with the `tokenizers` package, take the prompt's text off, search, cut."""
    tokenizer = any_tokenizer
    tokens = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)
    prompt, output = data.draw(tokens), data.draw(tokens)
    assume("<0x20>" not in map(tokenizer._backend.id_to_token, prompt))  # stripped when it comes first
    before = tokenizer._backend.decode(prompt, skip_special_tokens=True)
    whole = tokenizer._backend.decode(prompt + output, skip_special_tokens=True)
    assume(whole.startswith(before))
    text = whole[len(before) :]

    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 4))
    stops = [text[a : a + n] for a, n in data.draw(st.lists(spans, max_size=3))] if text else []
    stops += data.draw(st.lists(st.sampled_from(["a", "x b", "�", "zzz"]), max_size=1))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(output) - 1)))) | {0, len(output)})
    chunks = [output[a:b] for a, b in pairwise(cuts)] or [[]]

    detokenizer, deltas = stream(tokenizer, prompt, chunks, tuple(stops))
    where = min((text.find(stop) for stop in stops if stop in text), default=None)
    assert detokenizer.text == (text if where is None else text[:where])
    assert "".join(delta.text for delta in deltas) == detokenizer.text
    assert (deltas[-1].stopped is None) == (where is None)
    used = [delta.tokens_used for delta in deltas]
    assert used == sorted(used)
    assert where is not None or used[-1] == len(output)
    texts = detokenizer.token_texts()
    assert len(texts) == used[-1]
    assert "".join(entry.text for entry in texts) == detokenizer.text
    assert all(detokenizer.text[entry.offset :].startswith(entry.text) for entry in texts)

    whole_at_once, _ = stream(tokenizer, prompt, [output], tuple(stops))
    assert whole_at_once.text == detokenizer.text
    assert whole_at_once.token_texts() == texts


def test_a_stop_string_over_several_tokens_never_leaks_its_beginning(byte_level_tokenizer):
    output = byte_level_tokenizer.encode("so ABCDEFGHIJ and on")
    assert len(output) > 4
    detokenizer, deltas = stream(byte_level_tokenizer, [], singly(output), ("DEFGHIJ",))
    assert detokenizer.text == "so ABC"
    assert deltas[-1].stopped == "DEFGHIJ"
    completed = byte_level_tokenizer.decode(output[: deltas[-1].tokens_used])
    assert "DEFGHIJ" in completed
    assert "DEFGHIJ" not in byte_level_tokenizer.decode(output[: deltas[-1].tokens_used - 1])


def test_a_stop_string_inside_a_token_is_found(piece_tokenizer):
    token = piece_tokenizer._backend.token_to_id
    output = [token("a"), token("Pari"), token("s")]
    detokenizer, deltas = stream(piece_tokenizer, [], singly(output), ("ari",))
    assert detokenizer.text == "aP"
    assert deltas == [TextDelta("", None, 0), TextDelta("aP", "ari", 2)]


def test_a_stop_string_in_the_prompt_alone_is_not_found(byte_level_tokenizer):
    prompt = byte_level_tokenizer.encode("the end")
    output = byte_level_tokenizer.encode(" of the fox")
    detokenizer, deltas = stream(byte_level_tokenizer, prompt, singly(output), ("the end", "d of"))
    assert detokenizer.text == " of the fox"
    assert deltas[-1].stopped is None


def test_a_near_miss_is_sent_whole_in_the_end(byte_level_tokenizer):
    output = byte_level_tokenizer.encode("ABCDEFGHIX")
    detokenizer, _ = stream(byte_level_tokenizer, [], singly(output), ("DEFGHIJ",))
    assert detokenizer.text == "ABCDEFGHIX"
    cut, deltas = stream(
        byte_level_tokenizer, [], singly(byte_level_tokenizer.encode("ABCDEF")), ("DEFGHIJ",)
    )
    assert cut.text == "ABCDEF"
    assert deltas[-1].stopped is None


def test_a_stop_string_that_is_the_first_token_leaves_an_empty_text_and_counts_it(piece_tokenizer):
    token = piece_tokenizer._backend.token_to_id("Pari")
    detokenizer, deltas = stream(piece_tokenizer, [], [[token], [token]], ("Pari",))
    assert (detokenizer.text, deltas) == ("", [TextDelta("", "Pari", 1)])


def test_the_end_token_is_used_but_no_text(word_tokenizer):
    one, eos = word_tokenizer._backend.token_to_id("one"), 2
    detokenizer, deltas = stream(word_tokenizer, [], [[one, eos]], drop_last=True)
    assert (detokenizer.text, deltas[-1].tokens_used) == ("one", 2)
    assert [entry.text for entry in detokenizer.token_texts()] == ["one", ""]


def test_a_stop_token_that_is_ordinary_text_is_left_out_of_the_text(word_tokenizer):
    one, two = (word_tokenizer._backend.token_to_id(word) for word in ("one", "two"))
    detokenizer = Detokenizer(word_tokenizer, [], SamplingParams(stop_token_ids=(two,)), EOS)
    detokenizer.add([one], finished=False)
    assert detokenizer.add([two], finished=True, drop_last=True) == TextDelta("", None, 2)
    assert detokenizer.text == "one"
    with pytest.raises(AssertionError):
        detokenizer.add([one], finished=True)


@pytest.mark.parametrize("kind", ["byte_level", "piece"])
def test_an_answer_cut_within_a_character_ends_as_decoding_it_does_in_stream_and_plain(kind, request):
    tokenizer = request.getfixturevalue(f"{kind}_tokenizer")
    token = tokenizer._backend.token_to_id
    names = ("a", "<0xF0>", "<0x9F>") if kind == "piece" else ("a", "ð", "Ł")
    output = [token(name) for name in names]
    expected = tokenizer.decode(output)
    assert "�" in expected
    for chunks in (singly(output), [output]):
        detokenizer, deltas = stream(tokenizer, [], chunks)
        assert detokenizer.text == expected
        assert "".join(delta.text for delta in deltas) == expected
    assert "�" not in "".join(delta.text for delta in stream(tokenizer, [], singly(output))[1][:-1])


def test_stop_strings_count_only_after_min_tokens(piece_tokenizer):
    token = piece_tokenizer._backend.token_to_id
    output = [token(name) for name in ("a", "x", "a", "x", "b")]
    for min_tokens, text, used in ((0, "a", 2), (1, "a", 2), (2, "axa", 4), (3, "axa", 4), (4, "axaxb", 5)):
        detokenizer, deltas = stream(piece_tokenizer, [], singly(output), ("x",), min_tokens=min_tokens)
        assert (detokenizer.text, deltas[-1].tokens_used) == (text, used)
        assert (deltas[-1].stopped is None) == (min_tokens == 4)


def test_text_of_the_demo_base_token_by_token(demo_base):
    tokenizer = Tokenizer.load(demo_base)
    prompt = tokenizer.encode("Once")
    text = " upon 😀 a time 世界, naïve\n\n12 €uros\t👩‍👩‍👧"
    output = tokenizer.encode(text)
    detokenizer, deltas = stream(tokenizer, prompt, singly(output))
    assert detokenizer.text == text
    assert not any("�" in delta.text for delta in deltas)
