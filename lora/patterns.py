"""Matches module paths against the patterns of an adapter config, exactly as PEFT does, in bounded time.

Patterns come from users and Python's own `re` cannot be interrupted. So only plain ones, which repeat and
choose nothing, go to `re`; the others go to `regex`, which can be, and what the two would read differently is
refused. Rules: PEFT 0.21, `check_target_module_exists` and `get_pattern_key`.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Collection, Iterable
from typing import Any

import regex  # type: ignore[import-untyped, unused-ignore]

from .errors import AdapterInvalid

Pattern = re.Pattern[str] | Any
"""Of `re`, or of `regex`, which has no types."""
Match = re.Match[str] | Any

TIME_LIMIT = 5.0
"""Seconds that all matching for one adapter may take; ordinary ones take milliseconds."""
_LENGTH_LIMIT = 2000
_SIZE_LIMIT = 50_000
"""Of a pattern's characters times all its counts: compiling, which nothing can interrupt, `regex` writes a counted
part out as often as it counts."""
_READ_DIFFERENTLY = re.compile(r"\[\[?:|\{[a-z]")
"""POSIX classes and fuzzy counts, which `regex` has and `re` takes literally."""
_PLAIN = re.compile(r"[A-Za-z0-9_.^-]*")
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")


class Matcher:
    """Compiled patterns of one adapter and the time that is left for them."""

    def __init__(self, seconds: float = TIME_LIMIT) -> None:
        self._deadline = time.monotonic() + seconds
        self._compiled: dict[str, Pattern] = {}

    def fullmatch(self, pattern: str, path: str, key: str) -> bool:
        """`target_modules` and `exclude_modules` given as one text. `key` is the config key, for messages."""
        return self._run(pattern, pattern, path, key, full=True) is not None

    def ends_path(self, pattern: str, path: str, key: str) -> bool:
        """Keys of `rank_pattern` and `alpha_pattern`: the pattern must match whole trailing parts of the
        path."""
        return self._run(rf"(.*\.)?({pattern})$", pattern, path, key) is not None

    def layer_index(self, layers_pattern: Iterable[str], path: str) -> int | None:
        """Which layer `layers_to_transform` takes the path for; None: PEFT sees no layer in it."""
        patterns = list(layers_pattern)
        if not patterns:
            plain = _FIRST_INDEX.match(path)
            return int(plain["idx"]) if plain else None
        for pattern in patterns:
            whole = rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."
            found = self._run(whole, pattern, path, "layers_pattern")
            if found is not None:
                return int(found["idx"])
        return None

    def _run(self, whole: str, pattern: str, path: str, key: str, *, full: bool = False) -> Match | None:
        compiled = self._compiled.get(whole)
        if compiled is None:
            compiled = self._compiled[whole] = _compile(whole, pattern, key)
        left = self._deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            if isinstance(compiled, re.Pattern):
                return compiled.fullmatch(path) if full else compiled.match(path)
            call = compiled.fullmatch if full else compiled.match
            return call(path, timeout=left, concurrent=True)
        except TimeoutError:
            raise AdapterInvalid(f"{key}: matching {pattern[:200]!r} takes too long") from None


def _compile(whole: str, pattern: str, key: str) -> Pattern:
    if len(pattern) > _LENGTH_LIMIT:
        raise AdapterInvalid(f"{key}: a pattern has {len(pattern)} characters, more than {_LENGTH_LIMIT}")
    if _size(pattern) > _SIZE_LIMIT:
        raise AdapterInvalid(f"{key}: {pattern[:200]!r} repeats its parts too often")
    if _READ_DIFFERENTLY.search(pattern):
        raise AdapterInvalid(f"{key}: {pattern[:200]!r} has a construct that is not read alike everywhere")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = re.compile(whole)
            return plain if _PLAIN.fullmatch(pattern) else regex.compile(whole)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        raise AdapterInvalid(f"{key}: {pattern[:200]!r} is not a regular expression ({error})") from None


def _size(pattern: str) -> int:
    """How long `pattern` could be with every counted part written out, nested ones too."""
    size = len(pattern)
    for least, most in _COUNT.findall(pattern):
        size *= max(int(least or 1), int(most or 1), 1)
    return size


def trailing_parts(path: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `b.c`, `c`: what an entry of a module list must equal to name the path."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def names(entries: Collection[str], path: str) -> bool:
    """Whether a list of module names (a set, for speed) names the path, as a whole or by trailing parts."""
    return bool(entries) and any(part in entries for part in trailing_parts(path))
