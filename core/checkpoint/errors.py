"""The one exception for a model that cannot be brought into a usable local folder."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The model named by the user cannot be found, fetched, read or converted; the message says why."""
