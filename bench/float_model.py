"""The float32 model in transformers: what every quantised form is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def load(folder: Path, **settings: Any) -> Any:
    """transformers' model of `folder`; `settings` as its `from_pretrained` takes them."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind: Any = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, **{"dtype": torch.float32, **settings}).eval()


@torch.inference_mode()
def logits(model: Any, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of all windows, one after another: float32 [tokens, vocab]."""
    return torch.cat([model(torch.tensor([list(window)])).logits[0].float() for window in windows])
