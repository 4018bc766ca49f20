"""vLLM's CPU build in float32, through `LLMEngine`: requests added, `step` called, deltas taken, nothing detokenised.

A token's moment is when `LLMEngine.step` returns it. The engine runs in processes of its own, as that build wants it,
with its OpenMP threads bound to every core this process may use. The prefix cache is off: no prompt comes twice.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from . import OnStep, Peer, Request, Setup

KV_GIB = 1
AT_LEAST_LORAS = 8


class VllmCpu:
    def __init__(self, setup: Setup) -> None:
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: setup.threads])
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        # What the environment says is read at import.
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        lora = {}
        if setup.adapters:
            # No fewer than it has to serve at once: else they would take turns.
            loras = max(AT_LEAST_LORAS, len(setup.adapters))
            lora = {"enable_lora": True, "max_loras": loras, "max_lora_rank": setup.max_rank}
        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": setup.max_tokens,
            "max_num_seqs": setup.max_streams,
            "enable_prefix_caching": False,
            **lora,
        }
        self._engine = LLM(model=str(setup.base), **settings).llm_engine
        self._loras = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(setup.adapters.items(), 1)
        }
        self._keys = itertools.count(1)
        self._facts = {"version": version("vllm"), "kv_gib": KV_GIB, "cores": cores, **settings}

    def answer(self, requests: Sequence[Request], new: int, on_step: OnStep) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=new,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        places: dict[str, int] = {}
        for place, request in enumerate(requests):
            key = str(next(self._keys))
            lora = None if request.adapter is None else self._loras[request.adapter]
            prompt: Any = {"prompt_token_ids": list(request.prompt)}
            self._engine.add_request(key, prompt, params, lora_request=lora)
            places[key] = place
        while self._engine.has_unfinished_requests():
            got: list[int] = []
            for output in self._engine.step():
                got += [places[output.request_id]] * sum(len(one.token_ids) for one in output.outputs)
            if got:
                on_step(got)

    def facts(self) -> Mapping[str, Any]:
        return self._facts

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def start(setup: Setup) -> Peer:
    return VllmCpu(setup)
