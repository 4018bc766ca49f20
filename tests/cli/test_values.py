"""Sizes, times and progress as people write and read them."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import click
import pytest
from heddle.api.cli.options import repeat_flag
from heddle.api.cli.progress import ProgressBars
from heddle.api.cli.render import ago, size
from heddle.api.cli.values import ByteSize, FiniteRange, ServerUrl


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512MiB", 512 * 1024**2),
        ("512 mib", 512 * 1024**2),
        ("2g", 2_000_000_000),
        ("2GB", 2_000_000_000),
        ("2Gi", 2 * 1024**3),
        ("0.5KiB", 512),
    ],
)
def test_a_size(text, count):
    assert ByteSize().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "-1", "0", "0.1", "1e9", "12 parsecs", "MiB", "1..5k", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(click.BadParameter):
        ByteSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://example.org/v1/", "https://example.org/v1"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000/v1", "http://localhost:8000/v1"),
    ],
)
def test_a_servers_address(text, url):
    assert ServerUrl().convert(text, None, None) == url


NO_URLS = [
    *("", "notaurl", "localhost", "/v1", "ftp://a:1", "http://", "http:///v1", "http://:8000"),
    *("http://a:port", "a:99999", "a:0", "http://[::1", "http://a b:1", "HEDDLE:", "://a:1"),
]


@pytest.mark.parametrize("text", NO_URLS)
def test_what_is_no_servers_address(text):
    with pytest.raises(click.BadParameter, match="give http://HOST:PORT"):
        ServerUrl().convert(text, None, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (460800, "450.0 KiB"), (5 << 40, "5.0 TiB")],
)
def test_a_size_in_words(count, text):
    assert size(count) == text


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (None, "never"),
        ("2025-06-01T12:00:00Z", "0 s ago"),
        ("2025-06-01T12:00:03Z", "0 s ago"),  # clocks differ
        ("2025-06-01T11:58:30+00:00", "90 s ago"),
        ("2025-06-01T13:30:00+02:00", "30 min ago"),
        ("2025-05-30T12:00:00Z", "2 d ago"),
    ],
)
def test_how_long_ago(time, text):
    assert ago(time, datetime(2025, 6, 1, 12, tzinfo=UTC)) == text


@pytest.mark.parametrize(
    ("args", "expanded"),
    [
        (["m", "--f", "a=1", "b=2"], ["m", "--f", "a=1", "--f", "b=2"]),
        (["--f", "a=1", "m"], ["--f", "a=1", "m"]),
        (["--f", "a=1", "b=2", "--g", "c=3"], ["--f", "a=1", "--f", "b=2", "--g", "c=3"]),
        (["--f", "nameless"], ["--f", "nameless"]),
        (["c=3"], ["c=3"]),
    ],
)
def test_one_flag_with_several_values(args, expanded):
    assert repeat_flag(args, ("--f",)) == expanded


def test_progress_without_a_terminal_is_one_line_a_thing(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with ProgressBars() as bars:
        for done in range(3):
            bars("downloading", done, 3)
        bars("waiting", 0, 0)
    assert stderr.getvalue() == "downloading …\nwaiting …\n"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "four"])
def test_a_number_is_finite_and_within_its_bounds(text):
    with pytest.raises(click.BadParameter):
        FiniteRange(min=0).convert(text, None, None)
    assert FiniteRange(min=0).convert("0.5", None, None) == 0.5


def test_long_work_says_how_far_it_is_where_stderr_is_no_terminal(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("heddle.api.cli.progress.time.monotonic", lambda: now[0])
    with ProgressBars() as bars:
        for done in range(5):
            bars("quantising", done, 30)
            now[0] += 15
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["quantising …", "quantising: 2 of 30", "quantising: 4 of 30"]
