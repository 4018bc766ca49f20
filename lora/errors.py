"""The one exception for an adapter that is not taken."""

from __future__ import annotations


class AdapterInvalid(ValueError):
    """An adapter's files do not fit the base or are not understood exactly; the message names tensor or key."""


class AdapterCorrupt(RuntimeError):
    """A stored adapter no longer has the bytes it was stored with."""
