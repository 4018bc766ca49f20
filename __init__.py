"""Heddle: serve thousands of LoRA adapters over one quantised LLaMA base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from .core.llm import LLM
    from .core.sampling_params import SamplingParams
    from .core.text.grammar import Grammar


def __getattr__(name: str) -> Any:
    # Lazily, so that `import heddle` and the server process never load torch.
    if name == "LLM":
        from .core.llm import LLM

        return LLM
    if name == "SamplingParams":
        from .core.sampling_params import SamplingParams

        return SamplingParams
    if name == "Grammar":
        from .core.text.grammar import Grammar

        return Grammar
    raise AttributeError(f"module 'heddle' has no attribute {name!r}")
