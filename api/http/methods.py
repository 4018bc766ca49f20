"""Which methods a path takes, as `Allow` says it."""

from __future__ import annotations

from collections.abc import Iterable


def allow(methods: Iterable[str]) -> str:
    """The header's value. `HEAD` is answered wherever `GET` is (RFC 9110, 9.1), without a handler of its own."""
    names = set(methods)
    return ", ".join(sorted(names | {"HEAD"} if "GET" in names else names))
