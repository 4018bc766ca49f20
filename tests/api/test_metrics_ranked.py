"""Counters by name that stay few and monotonic however many names there are."""

from __future__ import annotations

import random

from heddle.api.metrics.ranked import MARGIN, OTHER, TOP, RankedCounters
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

COUNTERS = {"t_requests": "requests", "t_tokens": "tokens"}


def shown(counters: RankedCounters) -> dict[str, dict[tuple[str, ...], float]]:
    """What a scrape reads: each counter's series by the values of their labels."""
    from prometheus_client import generate_latest

    registry = CollectorRegistry()
    registry.register(counters)
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            series = found.setdefault(family.name, {})
            labels = tuple(sample.labels.values())
            assert labels not in series, "one series a name"
            series[labels] = sample.value
    return found


def test_a_thousand_names_make_fifty_series_and_other_and_no_counter_ever_goes_down():
    """Names of very different use, in random order; scraped after every few of 20,000 requests."""
    chance = random.Random(0)
    counters = RankedCounters(COUNTERS, ["name"])
    names = [f"n{index}" for index in range(1000)]
    weights = [1 / (1 + index) for index in range(1000)]
    chance.shuffle(weights)
    truth = {name: [0, 0] for name in names}
    before: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in COUNTERS}
    entered = left = 0
    for number, name in enumerate(chance.choices(names, weights, k=20_000)):
        tokens = chance.randrange(40)
        counters.count((name,), [1, tokens])
        truth[name][0] += 1
        truth[name][1] += tokens
        if number % 50:
            continue
        now = shown(counters)
        for index, counter in enumerate(COUNTERS):
            series, earlier = now[counter], before[counter]
            assert len(series) <= TOP + 1
            assert sum(series.values()) == sum(counts[index] for counts in truth.values())
            assert series[(OTHER,)] >= earlier.get((OTHER,), 0)
            for (label,), value in series.items():
                if label != OTHER:
                    assert value <= truth[label][index]
            # A name that is still there counts on; one that came back since begins anew, as after a restart.
            gone, new = earlier.keys() - series.keys(), series.keys() - earlier.keys()
            left, entered = left + len(gone), entered + len(new)
            steady = [label for label in earlier.keys() & series.keys() if label != (OTHER,)]
            lower = [label for label in steady if series[label] < earlier[label]]
            assert not lower or gone or new, "only where places changed hands between two scrapes"
        before = now
    assert left > 0, "names moved in and out"
    ranked = sorted(names, key=lambda name: -sum(truth[name]))
    ((_, tokens_series),) = [(k, v) for k, v in before.items() if k == "t_tokens"]
    clearly = [n for n in ranked[:TOP] if sum(truth[n]) > MARGIN * sum(truth[ranked[TOP]])]
    assert len(clearly) > 30
    assert {(name,) for name in clearly} <= tokens_series.keys()


def test_a_name_that_leaves_hands_its_count_to_other_and_one_that_enters_begins_at_zero():
    counters = RankedCounters(COUNTERS, ["name"], top=2)
    counters.count(("a",), [1, 79])
    counters.count(("b",), [1, 9])
    counters.count(("c",), [1, 8])
    assert shown(counters)["t_tokens"] == {("a",): 79, ("b",): 9, (OTHER,): 8}
    counters.count(("c",), [1, 1])
    assert shown(counters)["t_tokens"] == {("a",): 79, ("b",): 9, (OTHER,): 9}, "11 is not an eighth above 10"
    counters.count(("c",), [1, 3])
    assert shown(counters)["t_tokens"] == {("a",): 79, ("c",): 3, (OTHER,): 18}
    assert shown(counters)["t_requests"] == {("a",): 1, ("c",): 1, (OTHER,): 3}
    counters.count(("b",), [1, 20])
    assert shown(counters)["t_tokens"] == {("a",): 79, ("b",): 20, (OTHER,): 21}


def test_names_of_like_use_do_not_keep_changing_places():
    counters = RankedCounters(COUNTERS, ["name"], top=1)
    changes, holder = 0, None
    for number in range(10_000):
        counters.count((("a", "b")[number % 2],), [1, 0])
        (name,) = counters._shown
        changes, holder = changes + (name != holder), name
    assert changes < 5


def test_a_name_that_is_called_other_is_no_second_series():
    counters = RankedCounters(COUNTERS, ["one", "two"])
    for key in ((OTHER, OTHER), (OTHER, "x"), ("t", OTHER), (OTHER, OTHER)):
        counters.count(key, [1, 10])
    assert shown(counters)["t_tokens"] == {(OTHER, OTHER): 20, (OTHER, "x"): 10, ("t", OTHER): 10}


def test_fifty_thousand_short_lived_names_take_no_more_memory_than_a_thousand():
    counters = RankedCounters(COUNTERS, ["name"])
    for number in range(50_000):
        counters.count((f"n{number}",), [1, number % 7])
    assert len(counters._use) <= 20 * TOP + 1
    series = shown(counters)["t_requests"]
    assert len(series) == TOP + 1
    assert sum(series.values()) == 50_000
