"""Numbers of bytes as people write them: 1000000, 512MiB, 1.5GB."""

from __future__ import annotations

import re

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse(text: str) -> int:
    """Bytes, at least 1. Raises ValueError with a message for the user."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip().lower(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a size: give bytes, or a number with a unit such as 512MiB or 2GB")
    size = int(float(match.group(1)) * UNITS[match.group(2)])
    if size <= 0:
        raise ValueError(f"{text!r} must be more than nothing")
    return size
