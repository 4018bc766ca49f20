"""Heddle's engine, as `heddle.LLM` and the engine process drive it: commands in, one step, tokens out.

A token's moment is when `Engine.step` returns the outputs that hold it: what is sent on to a client then.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from heddle import __version__
from heddle.core.config import EngineConfig
from heddle.core.engine.engine import Engine
from heddle.core.engine.host_memory import keep_freed
from heddle.core.errors import failure_of
from heddle.core.messages import AdapterUse, Event, Generate, GetMemory, KnowAdapter, Outputs, Reply
from heddle.core.model.config import ModelConfig
from heddle.core.sampling_params import SamplingParams
from heddle.lora import canonical
from heddle.lora.inspect import inspect

from . import OnStep, Peer, Request, Setup

POOL_BYTES = 1 << 30
"""KV and adapters: vLLM has as much for KV alone."""


class HeddleEngine:
    def __init__(self, setup: Setup) -> None:
        settings = {"model": str(setup.base), "num_threads": setup.threads, "pool_memory": POOL_BYTES}
        self._woken = threading.Event()
        self._engine = Engine(
            msgspec.convert(settings | dict(setup.options), EngineConfig), wake=self._woken.set
        )
        keep_freed()  # as the engine process does, and what it does until the first request
        while self._engine.use_idle_time():
            pass
        self._files = tempfile.TemporaryDirectory(prefix="heddle-adapters-")
        self._keys = itertools.count(1)
        self._digests = {name: self._know(setup, path) for name, path in setup.adapters.items()}

    def _know(self, setup: Setup, folder: Path) -> str:
        base = ModelConfig.load(setup.base).base_model(setup.base.name, setup.base)
        spec = inspect(folder, base, max_rank=setup.max_rank, max_bytes=1 << 30)
        file = Path(self._files.name) / spec.digest.removeprefix("sha256:")
        canonical.write(spec, folder, file)
        self._engine.handle(KnowAdapter(digest=spec.digest, path=str(file)))
        return spec.digest

    def answer(self, requests: Sequence[Request], new: int, on_step: OnStep) -> None:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, seed=0)
        places: dict[int, int] = {}
        events: list[Event] = []
        for place, request in enumerate(requests):
            key = next(self._keys)
            uses = [] if request.adapter is None else [AdapterUse(self._digests[request.adapter])]
            command = Generate(
                key=key, group=key, prompt_token_ids=list(request.prompt), params=params, adapters=uses
            )
            places[key] = place
            events += self._engine.handle(command)
        while places:
            if self._engine.idle and not events:
                self._woken.wait()
            self._woken.clear()
            self._take([*events, *self._engine.step()], places, on_step)
            events = []

    def _take(self, events: Sequence[Event], places: dict[int, int], on_step: OnStep) -> None:
        got: list[int] = []
        for event in events:
            for output in event.outputs if isinstance(event, Outputs) else ():
                if output.error is not None:
                    raise failure_of(output.error)
                got += [places[output.key]] * len(output.token_ids)
                if output.finish_reason is not None:
                    del places[output.key]
        if got:
            on_step(got)

    def facts(self) -> Mapping[str, Any]:
        ready = self._engine.ready
        (reply,) = self._engine.handle(GetMemory(next(self._keys)))
        assert isinstance(reply, Reply)
        assert reply.memory is not None
        written = [part.bytes for part in reply.memory.process if part.part.startswith("pool")]
        return {
            "version": __version__,
            "weights": ready.quantization,
            "weight_bytes": ready.weight_bytes,
            "pool_bytes": POOL_BYTES,
            "pool_bytes_written": sum(written),
            "notes": ready.notes,
        }

    def close(self) -> None:
        self._engine.close()
        self._files.cleanup()


def start(setup: Setup) -> Peer:
    return HeddleEngine(setup)
