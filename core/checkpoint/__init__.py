"""Bring a base model into a local Hugging Face folder: hub names, `.gguf` files, the demo base. No torch."""

from __future__ import annotations

from .demo import demo_base
from .errors import CheckpointError
from .resolve import resolve

__all__ = ["CheckpointError", "demo_base", "resolve"]
