"""Offers to speak another protocol than HTTP/1, which HTTP lets be ignored."""

from __future__ import annotations

from collections.abc import Iterator

OFFER = frozenset({b"upgrade", b"http2-settings"})
"""Headers, and options of `Connection`, that make one."""


def without_offer(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """The other headers, and of `Connection` what else it says."""
    for name, value in headers:
        if name == b"connection":
            options = [option for option in value.split(b",") if option.strip().lower() not in OFFER]
            if options:
                yield name, b",".join(options)
        elif name not in OFFER:
            yield name, value
