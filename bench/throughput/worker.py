"""The process that serves: one peer, asked over stdin, answering on stdout with one JSON object a line.

    python -P -m throughput.worker MODULE        (MODULE: one of `peers`)

Runs in the peer's own environment, so standard library alone. It says `{"imported": true}` when the interpreter and
torch are there and nothing else is; then it is told a `Setup`, and says `{"ready": true}`; then it is sent rounds, and
says what each took, or `{}`, and says the peer's facts; it ends with its input. What libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from . import energy
from .peers import Peer, Request, Setup


def main(module: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")
    say(out, {"imported": True})
    line = sys.stdin.readline()
    if not line:
        return
    peer: Peer = importlib.import_module(f"{__package__}.peers.{module}").start(as_setup(json.loads(line)))
    try:
        say(out, {"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            say(out, one_round(peer, **asked) if asked else dict(peer.facts()))
    finally:
        peer.close()


def as_setup(told: dict[str, Any]) -> Setup:
    adapters = {name: Path(path) for name, path in told.pop("adapters").items()}
    return Setup(base=Path(told.pop("base")), adapters=adapters, **told)


def one_round(peer: Peer, requests: Sequence[dict[str, Any]], new: int) -> dict[str, Any]:
    """`times`: of every request's tokens, in seconds from the start, which `seconds` counts from too."""
    batch = [Request(**request) for request in requests]
    times: list[list[float]] = [[] for _ in batch]

    def on_step(places: Sequence[int]) -> None:
        now = time.perf_counter() - began
        for place in places:
            times[place].append(now)

    before, began = energy.read(), time.perf_counter()
    peer.answer(batch, new, on_step)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "times": times, "joules": energy.joules(before, energy.read())}


def say(out: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
