"""Heddle in one Python process: the same engine as the server's, called directly."""

from __future__ import annotations

import itertools
import math
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch

from ..lora import canonical
from ..lora.inspect import AdapterSpec, inspect
from . import byte_size, checkpoint
from .config import EngineConfig
from .engine.engine import Engine
from .errors import failure_of
from .messages import (
    Abort,
    AdapterUse,
    Event,
    ForgetAdapter,
    Generate,
    KnowAdapter,
    Outputs,
    SequenceOutput,
)
from .model.config import ModelConfig
from .outputs import CompletionOutput, RequestOutput, SequenceCollector, best
from .sampling_params import SamplingParams, sequence_seed
from .text.tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

NOT_NEEDED = ("enable_lora", "max_loras", "max_cpu_loras")
"""vLLM's settings for what works here without any."""

AdapterChoice = str | None | Sequence[Mapping[str, Any]]
"""As the HTTP field `adapter`: a name, None for the base, or a list of {"name", "weight"} whose deltas are
summed."""


class LLM:
    """One base model and any number of adapters. Not for use from several threads at once.

    `settings` are the flags of `heddle serve` that concern an engine, with underscores (`EngineConfig`).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        max_adapter_bytes: int = 2 << 30,
        **settings: Any,
    ) -> None:
        folder = checkpoint.resolve(str(model))
        self.config = _engine_config(folder, settings)
        self._max_adapter_bytes = max_adapter_bytes
        self.tokenizer = Tokenizer.load(folder)
        model_config = ModelConfig.load(folder)
        self._base = model_config.base_model(folder.name, folder)
        self._eos_token_ids = frozenset(model_config.eos_token_ids)
        self._woken = threading.Event()
        self._engine = Engine(self.config, wake=self._woken.set)
        self._files = tempfile.TemporaryDirectory(prefix="heddle-adapters-")
        self._digests: dict[str, str] = {}
        self._keys = itertools.count(1)
        self._requests = itertools.count(1)
        for name, path in (adapters or {}).items():
            self.load_adapter(name, path)

    def close(self) -> None:
        """Give everything back; the object is of no use afterwards."""
        self._engine.close()
        self._files.cleanup()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- adapters

    @property
    def adapters(self) -> dict[str, str]:
        """Digest of every loaded adapter, by name."""
        return dict(self._digests)

    def load_adapter(self, name: str, path: str | Path) -> AdapterSpec:
        """Make the PEFT folder at `path` usable as `name`, in place of what had that name before.

        Raises `AdapterInvalid` where it does not fit the base or is not understood exactly.
        """
        folder = Path(path)
        spec = inspect(
            folder, self._base, max_rank=self.config.max_lora_rank, max_bytes=self._max_adapter_bytes
        )
        file = Path(self._files.name) / spec.digest.removeprefix("sha256:")
        if not file.exists():
            canonical.write(spec, folder, file)
        before = self._digests.get(name)
        self._digests[name] = spec.digest
        self._engine.handle(KnowAdapter(digest=spec.digest, path=str(file)))
        if before is not None:
            self._release(before)
        return spec

    def remove_adapter(self, name: str) -> None:
        """Forget `name` and free what it held. Raises KeyError for an unknown name."""
        self._release(self._digests.pop(name))

    def _release(self, digest: str) -> None:
        if digest not in self._digests.values():
            self._engine.handle(ForgetAdapter(digest))

    def _uses(self, choice: AdapterChoice) -> list[AdapterUse]:
        if choice is None:
            return []
        entries = [{"name": choice}] if isinstance(choice, str) else choice
        weights: dict[str, float] = {}
        for entry in entries:
            name, weight = entry.get("name"), entry.get("weight", 1.0)
            if name not in self._digests:
                raise ValueError(f"there is no adapter {name!r}; loaded are {sorted(self._digests)}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"the weight of adapter {name!r} must be a finite number, got {weight!r}")
            digest = self._digests[name]
            weights[digest] = weights.get(digest, 0.0) + weight
        return [AdapterUse(digest, weight) for digest, weight in weights.items()]

    # ---------------------------------------------------------------- generation

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many (texts or token ids), all in one batch; one `RequestOutput` a prompt.

        `sampling_params` and `adapter`: one for all prompts, or a list with one each. Raises `EngineFailure`
        with the HTTP interface's code where a prompt is refused (a ValueError too, unless trying again may help), and
        ValueError for wrong arguments.
        """
        several = _as_list_of_prompts(prompts)
        requests = [
            RequestOutput(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt),
            )
            for prompt in several
        ]
        return self._answer(requests, sampling_params or SamplingParams(), adapter)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the base's chat template.

        Without `sampling_params` an answer may be as long as the room there is.
        """
        if tools:
            self.tokenizer.refuse_unheard_tools()
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        requests = []
        for conversation in conversations:
            options: dict[str, Any] = {
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "template_kwargs": template_kwargs,
            }
            text = self.tokenizer.render_chat(list(conversation), **options)
            token_ids = self.tokenizer.encode_chat(list(conversation), **options)
            requests.append(RequestOutput(prompt=text, prompt_token_ids=token_ids))
        return self._answer(requests, sampling_params or SamplingParams(max_tokens=None), adapter)

    def logits(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[torch.Tensor]:
        """float32 [tokens, vocab] for each prompt: row i predicts token i + 1. For checks against other
        engines.

        They come out of the same pool, batch and forward as generation.
        """
        several = _as_list_of_prompts(prompts)
        # Log-probabilities of a prompt make the scheduler compute each of its rows, whatever the prefix cache
        # holds.
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0)
        commands = []
        for prompt, choice in zip(several, _per_prompt(adapter, len(several))):
            token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            commands.append(self._command(token_ids, params, self._uses(choice), next(self._requests)))
        vocab = self._base.vocab_size
        captured = {command.key: torch.empty(len(command.prompt_token_ids), vocab) for command in commands}

        def take(output: SequenceOutput) -> bool:
            if output.error is not None:
                raise failure_of(output.error)
            return False

        with self._engine.capture_logits(captured):
            self._run(commands, take)
        return list(captured.values())

    def _answer(
        self,
        requests: list[RequestOutput],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        adapter: AdapterChoice | Sequence[AdapterChoice],
    ) -> list[RequestOutput]:
        count = len(requests)
        settings = (
            [sampling_params] * count if isinstance(sampling_params, SamplingParams) else sampling_params
        )
        if len(settings) != count:
            raise ValueError(f"{len(settings)} sampling_params for {count} prompts")
        collectors: dict[int, SequenceCollector] = {}
        owners: list[list[int]] = []
        commands = []
        for request, params, choice in zip(requests, settings, _per_prompt(adapter, count)):
            params.validate(self._base.vocab_size)
            uses, group = self._uses(choice), next(self._requests)
            seed = sequence_seed(self.config.seed, group) if params.seed is None else params.seed
            width = params.best_of or params.n
            logprobs = 0 if width > params.n and params.logprobs is None else params.logprobs
            keys = []
            for index in range(width):
                own = msgspec.structs.replace(params, seed=sequence_seed(seed, index), logprobs=logprobs)
                command = self._command(request.prompt_token_ids, own, uses, group)
                collectors[command.key] = SequenceCollector(self.tokenizer, command, self._eos_token_ids)
                commands.append(command)
                keys.append(command.key)
            owners.append(keys)
        self._run(commands, lambda output: collectors[output.key].take(output))
        for request, params, keys in zip(requests, settings, owners):
            mine = [collectors[key] for key in keys]
            request.prompt_logprobs = mine[0].prompt_logprobs
            request.cached_tokens = mine[0].cached_tokens
            request.outputs = [
                one.completion(index, with_logprobs=params.logprobs is not None)
                for index, one in enumerate(best(mine, params.n))
            ]
        return requests

    # ---------------------------------------------------------------- the loop

    def _command(
        self, token_ids: list[int], params: SamplingParams, uses: list[AdapterUse], group: int
    ) -> Generate:
        return Generate(
            key=next(self._keys), group=group, prompt_token_ids=token_ids, params=params, adapters=uses
        )

    def _run(self, commands: Sequence[Generate], take: Callable[[SequenceOutput], bool]) -> None:
        """Step until all sequences have ended, feeding the engine no more than it queues.

        `take` sees every output, and says True to abort its sequence there. If it raises, all are aborted.
        """
        pending = deque(commands)
        live: set[int] = set()
        try:
            while pending or live:
                events: list[Event] = []
                while pending and len(live) < self.config.max_queued_requests:
                    command = pending.popleft()
                    live.add(command.key)
                    events += self._engine.handle(command)
                if self._engine.idle and not events:
                    self._woken.wait()
                self._woken.clear()
                events += self._engine.step()
                for output in _sequence_outputs(events):
                    if take(output):
                        self._engine.handle(Abort([output.key]))
                    elif output.finish_reason is None:
                        continue
                    live.discard(output.key)
        finally:
            if live:
                self._engine.handle(Abort(list(live)))


def _sequence_outputs(events: Sequence[Event]) -> Iterator[SequenceOutput]:
    for event in events:
        if isinstance(event, Outputs):
            yield from event.outputs


def _engine_config(folder: Path, settings: dict[str, Any]) -> EngineConfig:
    """Settings checked as strictly as the command line checks them."""
    for name in settings.keys() & set(NOT_NEEDED):
        warnings.warn(f"LLM(): {name} is not needed and has no effect", stacklevel=3)
    settings = {name: value for name, value in settings.items() if name not in NOT_NEEDED}
    unknown = settings.keys() - set(EngineConfig.__struct_fields__)
    if unknown:
        raise TypeError(f"LLM() has no setting {sorted(unknown)[0]!r}")
    if settings.get("quantization") == "bitsandbytes":
        settings = settings | {"quantization": "int8"}
    try:
        if isinstance(size := settings.get("pool_memory"), str):
            settings = settings | {"pool_memory": byte_size.parse(size)}
        return msgspec.convert(settings | {"model": str(folder)}, EngineConfig)
    except ValueError as error:  # msgspec's own are ValueErrors too
        raise ValueError(f"LLM(): {error}") from error


def _as_list_of_prompts(
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> list[str | Sequence[int]]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(adapter: AdapterChoice | Sequence[AdapterChoice], count: int) -> list[AdapterChoice]:
    """One choice a prompt. A list of mappings is one weighted choice for all; any other list has one each."""
    if (
        adapter is None
        or isinstance(adapter, str)
        or (adapter and all(isinstance(a, Mapping) for a in adapter))
    ):
        return [adapter] * count  # type: ignore[list-item]
    if len(adapter) != count:
        raise ValueError(f"{len(adapter)} adapters for {count} prompts")
    return list(adapter)  # type: ignore[arg-type]
