"""Malformed requests by the thousand, each from its number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

from .malformed_bodies import Malformed, json_body, multipart_body
from .malformed_files import adapter_config, safetensors_file


def malformed(number: int, adapter: Path) -> Malformed:
    """The `number`-th, always the same. `adapter`: a folder whose files are sound."""
    random = Random(number)
    makers: list[Callable[[Random, Path], Malformed]] = [
        json_body,
        json_body,
        multipart_body,
        safetensors_file,
        adapter_config,
    ]
    return makers[number % len(makers)](random, adapter)
