"""The engine: model, pool, residency and scheduler put together; one step = schedule, execute, update."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...kernels import ops
from ...lora.adapter_memory import ResidencyError
from ...lora.residency import Residency
from ..config import EngineConfig
from ..errors import EngineStartError
from ..memory import MemoryPart, MemoryReport
from ..messages import (
    Abort,
    Command,
    EngineError,
    Event,
    EvictAdapter,
    ForgetAdapter,
    ForgetTenant,
    Generate,
    GetMemory,
    KnowAdapter,
    LoadAdapter,
    Outputs,
    PinAdapter,
    Ready,
    Reply,
    SequenceOutput,
    SetTenant,
    Stats,
)
from ..model.config import ModelConfig, ModelError
from ..model.loader import load_model
from ..sampling_params import ParamError
from ..scheduling.block_pool import BlockPool
from ..scheduling.plan import StepPlan
from ..scheduling.restore_cost import RestoreCost
from ..scheduling.scheduler import Scheduler
from ..text.grammar import GrammarCompiler
from ..text.tokenizer import Tokenizer
from . import accelerator as accelerators
from . import device as machine
from .adapter_memory import PoolAdapterMemory
from .grammars import Grammars
from .host_memory import give_back
from .memory_report import memory_report
from .pool_setup import PoolPages, allocate_pool, block_order, pool_layout, pool_notes
from .runner import Runner, adapters_at_fault
from .step_graphs import capture_steps, captures_steps, graph_bytes, graph_notes
from .warm_up import warm_up

logger = logging.getLogger(__name__)

CPU_TICK_BYTES, CUDA_TICK_BYTES = 16 << 20, 64 << 20
"""Bytes of cold adapters that are copied to the device between two steps at most: what running requests wait for."""

ProgressReport = Callable[[str, int, int], None]


class Engine:
    """Synchronous: `handle` what is asked, `step` while not `idle`. Both answer with the events they caused.

    `wake` is called from another thread when an idle engine has something to do again.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressReport | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Load the model and set up the pool. Raises `EngineStartError` with a message for the user."""
        self.config = config
        self.idle = False
        """The last step found nothing to do: only a command or `wake` can change that."""
        self._told = True
        """No command came since gauges and counters were last sent."""
        try:
            model_config = ModelConfig.load(Path(config.model))
            device = machine.resolve_device(config)
            dtype = machine.resolve_dtype(config, device, model_config.torch_dtype)
            accelerator = accelerators.for_device(device)
            captures = captures_steps(config, accelerator)
            max_model_len = machine.max_model_len(config, model_config)
            layout = pool_layout(config, model_config, dtype)
            operations = ops.for_device(device, config.backend)
            if config.num_threads is not None:
                getattr(operations, "set_num_threads", torch.set_num_threads)(config.num_threads)
            self._model = load_model(
                Path(config.model),
                model_config,
                quantization=config.quantization,
                dtype=dtype,
                device=device,
                ops=operations,
                int8_activations=config.int8_activations,
                quantize_head=config.quantize_head,
                batch_invariant=bool(config.batch_invariant),
                max_positions=max_model_len,
                progress=progress,
            )
        except ModelError as error:
            raise EngineStartError(str(error)) from error
        tokens, prompt_tokens = machine.step_tokens(config, device)
        step_bytes = machine.step_bytes(config, model_config, dtype, tokens)
        if captures:
            step_bytes += graph_bytes(config.max_num_seqs, model_config, dtype, max_model_len)
        pool_bytes = machine.pool_bytes(config, device, step_bytes)
        self._pool = allocate_pool(
            layout, pool_bytes, device, spare=int(captures and not accelerator.captures_when_met)
        )
        self._memory = PoolAdapterMemory(
            self._pool,
            model_config.linear_shapes,
            dtype,
            accelerator,
            config.max_lora_rank,
            operations.READS_ANY_FORM,
        )
        self._swap_bytes = self._host_bytes = int(config.swap_space * 2**30) // 2
        swap_slots = self._swap_bytes // self._pool.layout.block_bytes
        eos_token_ids = frozenset(model_config.eos_token_ids)
        self._runner = Runner(
            self._model, self._pool, self._memory.tables, eos_token_ids, swap_slots, accelerator
        )
        self._grammars = Grammars(
            lambda: GrammarCompiler(
                Tokenizer.load(Path(config.model)), model_config.vocab_size, eos_token_ids
            ),
            model_config.vocab_size,
            wake,
        )
        self._runner.guides = self._grammars.guides
        rows = machine.warm_up_rows(operations, device, tokens)
        warm_up(self._runner, self._pool, self._memory.tables, rows, max_model_len)
        if captures:
            self._runner.graphs = capture_steps(
                self._model,
                self._pool,
                self._memory.tables,
                accelerator,
                config.max_num_seqs,
                max_model_len,
                progress,
            )
        give_back()
        self._pool_pages = PoolPages(self._pool)
        if config.step_log is not None:
            self._runner.open_log(Path(config.step_log))
        on_cpu, block_bytes = device.type == "cpu", self._pool.layout.block_bytes
        weights = model_config.num_layers * sum(n * k for n, k in model_config.linear_shapes.values())
        restore_cost = RestoreCost.at_start(
            block_bytes=block_bytes, weights=weights, on_cpu=on_cpu, way=config.preemption
        )
        self._blocks = BlockPool(
            self._pool.num_blocks,
            token_cost=restore_cost.token_cost,
            order=block_order(config, self._pool.num_blocks),
        )
        self._residency = Residency(
            memory=self._memory,
            blocks=self._blocks,
            num_slots=self._memory.num_slots,
            num_rows=self._memory.num_rows,
            host_bytes=self._host_bytes,
            blocks_per_tick=max(1, (CPU_TICK_BYTES if on_cpu else CUDA_TICK_BYTES) // block_bytes),
            on_loaded=wake,
        )
        self._scheduler = Scheduler(
            pool=self._blocks,
            residency=self._residency,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=tokens,
            max_prompt_tokens=prompt_tokens,
            max_model_len=max_model_len,
            max_queued=config.max_queued_requests,
            eos_token_ids=eos_token_ids,
            restore_cost=restore_cost,
            swap_slots=swap_slots,
            enable_prefix_caching=config.enable_prefix_caching,
            fair=config.scheduling_policy == "fair",
        )
        self._loads: dict[str, list[int]] = {}
        """Calls that wait for an adapter to come to the device, by digest."""
        self._not_finite: list[str] = []
        """Adapters that made logits overflow, and nobody was told yet."""
        self._steps = 0
        self._step_seconds = 0.0
        self.ready = Ready(
            device=str(device),
            dtype=_name(dtype),
            quantization=self._model.quantization,
            quantization_reason=self._model.quantization_reason,
            max_model_len=max_model_len,
            num_blocks=self._pool.num_blocks,
            block_size=config.block_size,
            block_bytes=self._pool.layout.block_bytes,
            weight_bytes=self._model.weight_bytes,
            any_adapter_form=operations.READS_ANY_FORM,
            memory=self._memory_report(),
            notes=[*self._model.notes, *pool_notes(pool_bytes), *graph_notes(config, captures)],
        )

    def close(self) -> None:
        self._grammars.close()
        self._residency.close()
        self._runner.close()

    @property
    def has_work(self) -> bool:
        """Sequences are queued or running, or adapters and grammars are on their way."""
        return self._scheduler.has_work or self._grammars.waiting > 0

    @contextmanager
    def capture_logits(self, captured: dict[int, torch.Tensor]) -> Iterator[None]:
        """While it lasts, the logits of every row of these sequences go into their float32 [tokens,
        vocab]."""
        self._runner.captured = captured
        try:
            yield
        finally:
            self._runner.captured = {}

    # ---------------------------------------------------------------- commands

    def handle(self, command: Command) -> list[Event]:
        """Do what a command says. What it asks wrongly, or what fails, is answered, never raised."""
        self.idle = self._told = False
        try:
            return self._handle(command)
        except ResidencyError as refusal:
            error = EngineError(refusal.code, str(refusal))
        except ParamError as refusal:
            error = EngineError("invalid_request", str(refusal), refusal.param)
        except Exception:
            logger.exception("a command failed: %s", type(command).__name__)
            error = EngineError("internal_error", "the engine failed at this call; its log has the reason")
        return _refusal(command, error)

    def _handle(self, command: Command) -> list[Event]:
        match command:
            case Generate():
                self._check(command)
                if command.params.grammar is None:
                    return self._submit(command)
                tenants, compiling = self._scheduler.tenants, self._grammars.by_tenant
                if refusal := tenants.grammar_refusal(command.tenant, compiling):
                    return _refusal(command, refusal)
                self._grammars.begin(command)
                return []
            case Abort():
                self._grammars.forget(command.keys)
                self._scheduler.abort(command.keys)
                return []
            case KnowAdapter():
                self._residency.know(command.digest, command.path, command.pinned)
                return self._events([])
            case ForgetAdapter():
                self._residency.forget(command.digest)
                return self._events([])
            case LoadAdapter():
                self._residency.load(command.digest)
                self._loads.setdefault(command.digest, []).append(command.call)
                return []
            case EvictAdapter():
                self._residency.evict(command.digest, command.to)
            case PinAdapter():
                self._residency.pin(command.digest, command.pinned)
            case SetTenant():
                self._scheduler.tenants.set(command.tenant)
                return []
            case ForgetTenant():
                self._scheduler.tenants.forget(command.name)
                return []
            case GetMemory():
                return [Reply(call=command.call, memory=self._memory_report())]
            case _:
                return []  # Shutdown: for the loop around the engine
        return [*self._events([]), Reply(call=command.call)]

    def _submit(self, command: Generate) -> list[Event]:
        error = self._scheduler.submit(command)
        if error is None:
            return []
        self._grammars.forget([command.key])
        return _refusal(command, error)

    def _check(self, command: Generate) -> None:
        """Refuse what would reach the device and fail there. Raises `ParamError`."""
        vocab = self._model.config.vocab_size
        tokens = command.prompt_token_ids
        if not tokens:
            raise ParamError("prompt", "the prompt must not be empty")
        if min(tokens) < 0 or max(tokens) >= vocab:
            wrong = next(token for token in tokens if not 0 <= token < vocab)
            raise ParamError("prompt", f"prompt: token {wrong} is outside the vocabulary (0 to {vocab - 1})")
        if command.params.seed is None:
            raise ParamError("seed", "seed: whoever submits a sequence draws its seed")
        command.params.validate(vocab)

    # ---------------------------------------------------------------- steps

    def step(self) -> list[Event]:
        """Move adapters and grammars on, run one forward if anything is due, and say what came of it.

        A failure ends the sequences of this step, and the engine goes on; only a broken device is raised.
        """
        self._residency.tick()
        refused: list[Event] = []
        for command, error in self._grammars.drain():
            refused += self._submit(command) if error is None else _refusal(command, error)
        plan = self._scheduler.schedule()
        outputs = self._scheduler.drain() if plan is None else self._execute(plan)
        due = self._residency.busy or (self._scheduler.has_work and not self._residency.loading)
        self.idle = plan is None and not outputs and not due
        if not self._scheduler.has_work:
            self._runner.swap.clear()
        if self._grammars.guides:
            self._grammars.forget(output.key for output in outputs if output.finish_reason is not None)
        told, self._told = self._told, True
        return [*refused, *self._events(outputs, count=plan is not None or not told)]

    def use_idle_time(self) -> bool:
        """Do a part, some milliseconds, of what is better done before a request comes; False when nothing is left."""
        return self._pool_pages.take_one()

    def _execute(self, plan: StepPlan) -> list[SequenceOutput]:
        began = time.perf_counter()
        try:
            poison = self._blocks.free_blocks() if self.config.check_invariants else None
            result = self._runner.execute(plan, poison)
        except torch.AcceleratorError:
            raise  # nothing works on this device any more: the process must end and be started again
        except Exception:
            logger.exception("a step failed; its %d sequences end with an error", len(plan.chunks))
            return self._scheduler.fail(plan, "the engine failed at the step this request was in")
        self._not_finite += adapters_at_fault(plan, result)
        outputs = self._scheduler.update(plan, result)
        self._steps += 1
        self._step_seconds += time.perf_counter() - began
        if self.config.check_invariants:
            self._scheduler.check_integrity()
        return outputs

    def _events(self, outputs: list[SequenceOutput], count: bool = False) -> list[Event]:
        """States of adapters before the replies to who waits for them. `count`: gauges and counters may have
        changed."""
        events: list[Event] = []
        changes = self._residency.drain_changes()
        if outputs or changes or count:
            blamed, self._not_finite = self._not_finite, []
            events.append(Outputs(outputs=outputs, adapters=changes, not_finite=blamed, stats=self._stats()))
        for digest, refusal in self._residency.drain_loads():
            error = None if refusal is None else EngineError(refusal.code, str(refusal))
            events += [Reply(call=call, error=error) for call in self._loads.pop(digest, [])]
        return events

    def _stats(self) -> Stats:
        return Stats(**self._scheduler.stats(), steps=self._steps, step_seconds=self._step_seconds)

    def _memory_report(self) -> MemoryReport:
        gauges, swap = self._residency.stats(), self._runner.swap
        host = [
            MemoryPart(part="adapter copies", bytes=gauges["host_copy_bytes"], budget=self._host_bytes),
            MemoryPart(part="swapped sequences", bytes=swap.nbytes, budget=self._swap_bytes),
        ]
        return memory_report(
            self._model, self._pool, self._memory.tables, self._blocks.counts(), gauges["blocks_pinned"], host
        )


def _refusal(command: Command, error: EngineError) -> list[Event]:
    """The answer to a command that was not done."""
    match command:
        case Generate():
            output = SequenceOutput(key=command.key, finish_reason="error", error=error)
            return [Outputs(outputs=[output])]
        case LoadAdapter() | EvictAdapter() | PinAdapter() | GetMemory():
            return [Reply(call=command.call, error=error)]
        case _:
            return []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
