"""transformers' `generate`, over PEFT's mixed batch (`adapter_names`) where there are adapters; float32, static batch.

A token's moment is when `generate` hands the step's tokens to its streamer. Without adapters PEFT is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import peft
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from . import OnStep, Peer, Request, Setup


class Steps(BaseStreamer):
    """Gets the prompts first, then every step's tokens, one for each row."""

    def __init__(self, rows: int, on_step: OnStep) -> None:
        self._rows = range(rows)
        self._on_step = on_step
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        if self._begun:
            self._on_step(self._rows)
        self._begun = True

    def end(self) -> None:
        pass


class TransformersPeft:
    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        transformers.utils.logging.disable_progress_bar()
        kind: Any = transformers.AutoModelForCausalLM
        model = kind.from_pretrained(setup.base, dtype=torch.float32)
        for name, path in setup.adapters.items():
            if isinstance(model, peft.PeftModel):
                model.load_adapter(path, name)
            else:
                model = peft.PeftModel.from_pretrained(model, path, adapter_name=name)
        self._mixed = bool(setup.adapters)
        self._model = model.eval()

    def answer(self, requests: Sequence[Request], new: int, on_step: OnStep) -> None:
        ids = torch.tensor([list(request.prompt) for request in requests])
        extra = {}
        if self._mixed:
            extra["adapter_names"] = [request.adapter or "__base__" for request in requests]
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                streamer=Steps(len(requests), on_step),
                **extra,
            )

    def facts(self) -> Mapping[str, Any]:
        versions = {"torch": torch.__version__, "peft": peft.__version__ if self._mixed else None}
        return {"version": transformers.__version__, "weights": "float32", **versions}

    def close(self) -> None:
        pass


def start(setup: Setup) -> Peer:
    return TransformersPeft(setup)
