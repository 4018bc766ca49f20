"""What the load generator sends and when: distributions as they should be, one seed for all, data sets."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from heddle.api.load_generator.plan import Plan, arrivals, choices
from heddle.api.load_generator.texts import DatasetError, WordCount, dataset, random_texts, words

NAMES = [f"a{number}" for number in range(20)]
DRAWS = 20_000
CHI_SQUARE_19 = 43.8
"""What chi-square with 19 degrees of freedom exceeds once in a thousand (tables)."""


def drawn(popularity, exponent: float = 1.0, names=NAMES) -> list[str | None]:
    return list(itertools.islice(choices(names, popularity, random.Random(7), exponent), DRAWS))


def chi_square(counts: Counter, expected: dict[str, float]) -> float:
    return sum((counts[name] - expected[name]) ** 2 / expected[name] for name in expected)


def test_uniform_adapters_are_equally_frequent():
    counts = Counter(drawn("uniform"))
    assert chi_square(counts, dict.fromkeys(NAMES, DRAWS / len(NAMES))) < CHI_SQUARE_19


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_the_kth_of_zipf_is_as_frequent_as_one_over_k_to_the_exponent(exponent):
    weights = {name: rank**-exponent for rank, name in enumerate(NAMES, start=1)}
    expected = {name: DRAWS * weight / sum(weights.values()) for name, weight in weights.items()}
    counts = Counter(drawn("zipf", exponent))
    assert chi_square(counts, expected) < CHI_SQUARE_19
    flatter = {name: DRAWS * rank ** -(exponent - 0.3) for rank, name in enumerate(NAMES, start=1)}
    total = sum(flatter.values())
    assert chi_square(counts, {n: DRAWS * v / total for n, v in flatter.items()}) > CHI_SQUARE_19


def test_identical_is_the_first_and_distinct_each_in_turn():
    assert set(drawn("identical")) == {"a0"}
    assert drawn("distinct")[:41] == [*NAMES, *NAMES, "a0"]
    assert set(drawn("zipf", names=[])) == {None}
    assert set(drawn("zipf", names=["only"])) == {"only"}


def test_arrivals_are_those_of_a_poisson_process():
    rate = 50.0
    times = list(itertools.islice(arrivals(rate, random.Random(3)), DRAWS))
    gaps = sorted(after - before for before, after in itertools.pairwise([0.0, *times]))
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / rate, rel=4 / math.sqrt(DRAWS))
    # Kolmogorov and Smirnov's distance from 1 - exp(-rate t); 1.95 / sqrt(n) is exceeded once in a thousand.
    distance = max(abs((index + 1) / DRAWS - (1 - math.exp(-rate * gap))) for index, gap in enumerate(gaps))
    assert distance < 1.95 / math.sqrt(DRAWS)
    counts = Counter(int(time) for time in times if time < 300)
    per_second = [counts[second] for second in range(300)]
    average = sum(per_second) / 300
    variance = sum((count - average) ** 2 for count in per_second) / 299
    assert variance / average == pytest.approx(1, abs=5 * math.sqrt(2 / 299)), "as many as the mean"


def test_an_infinite_rate_and_a_closed_loop_have_all_at_the_start():
    assert list(itertools.islice(arrivals(math.inf, random.Random(0)), 5)) == [0.0] * 5
    assert list(itertools.islice(arrivals(None, random.Random(0)), 5)) == [0.0] * 5


def test_one_seed_makes_one_plan_and_each_part_is_drawn_by_itself():
    def shots(**changes):
        settings = {"texts": random_texts(12, 5, chat=False), "adapters": NAMES, "rate": 9.0, "requests": 50}
        return list(Plan(**{**settings, **changes}).shots())

    plain = shots()
    assert plain == shots()
    assert [shot.text for shot in shots(seed=1)] != [shot.text for shot in plain]
    faster = shots(rate=90.0, popularity="zipf")
    assert [shot.text for shot in faster] == [shot.text for shot in plain]
    assert [shot.intended for shot in faster] == pytest.approx([shot.intended / 10 for shot in plain])
    assert len({shot.text.prompt for shot in plain}) == 50, "no prefix cache helps by accident"


def test_a_plan_ends_with_its_requests_or_its_duration_whichever_comes_first():
    texts = random_texts(3, 1, chat=False)
    assert len(list(Plan(texts=texts, rate=100.0, requests=30).shots())) == 30
    timed = list(Plan(texts=texts, rate=100.0, duration=2.0).shots())
    assert 130 < len(timed) < 270
    assert timed[-1].intended < 2.0
    assert len(list(Plan(texts=texts, rate=100.0, duration=2.0, requests=5).shots())) == 5


def test_words_for_so_many_tokens_are_read_off_two_probes():
    count = WordCount.through((16, 25), (144, 217))  # 1.5 tokens a word and one more
    assert count.words(151) == 100
    assert count.words(1) == 1
    assert WordCount.through((16, 9), (144, 9)).words(40) == 40, (
        "a server that counts nothing is not believed"
    )
    assert len(words(100, random.Random(0)).split()) == 100


def test_a_data_set_is_sent_in_order_round_and_round(tmp_path: Path):
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"prompt": "one", "max_tokens": 3}\n\n{"prompt": "two", "output_tokens": 4, "adapter": "a"}\n{"prompt": "x"}\n'
    )
    texts = list(itertools.islice(dataset(path, 9, chat=False)(random.Random(0)), 4))
    assert [(text.prompt, text.max_tokens, text.adapter) for text in texts] == [
        ("one", 3, None),
        ("two", 4, "a"),
        ("x", 9, None),
        ("one", 3, None),
    ]
    (shot,) = Plan(texts=dataset(path, 9, chat=True), adapters=["b"], requests=1).shots()
    assert (shot.adapter, shot.text.prompt) == ("b", [{"role": "user", "content": "one"}])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "has no lines"),
        ('{"prompt": "a"}\n{', "line 2"),
        ('{"prompt": "a", "max_tokens": "b"}', "line 1"),
        ("{}", "either prompt or messages"),
        ('{"messages": []}', "--endpoint chat"),
        ("\xff", "line 1"),
    ],
)
def test_a_wrong_data_set_is_refused_with_its_line(content, reason, tmp_path: Path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DatasetError, match=reason):
        dataset(path, 1, chat=False)
