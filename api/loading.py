"""Opens everything behind the handlers: model files, registry, engine, services."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog

from ..core.client import EngineClient
from ..core.errors import EngineFailure, EngineStartError
from ..core.messages import Ready
from ..core.model.config import ModelConfig, ModelError
from ..core.text.tokenizer import Tokenizer, TokenizerError
from ..lora.errors import AdapterCorrupt, AdapterInvalid, StoreError
from ..lora.store import AdapterStore
from .adapters.service import AdapterService
from .config import ServerConfig
from .errors import ApiError
from .generation.grammar_checker import GrammarChecker
from .generation.guidance import GuidanceService
from .generation.prompts import Prompts
from .generation.service import Generation
from .metrics import Metrics
from .state import Services
from .tenants.accounts import Accounts
from .tenants.limits import Limiter
from .tenants.service import TenantService
from .tenants.store import TenantStore
from .tenants.usage import UsageService
from .workers import Workers

logger = structlog.get_logger(__name__)

START_ERRORS = (
    EngineStartError,
    ModelError,
    TokenizerError,
    StoreError,
    AdapterInvalid,
    AdapterCorrupt,
    ApiError,
    EngineFailure,
    OSError,
)
"""What keeps a server from starting and is for the user to mend."""


@dataclass(frozen=True)
class _Opened:
    """What is there before the engine is."""

    model: ModelConfig
    tokenizer: Tokenizer
    store: AdapterStore
    adapters: AdapterService


async def load(
    config: ServerConfig, engine: EngineClient, metrics: Metrics, workers: Workers, stack: AsyncExitStack
) -> Services:
    """Start `engine`, and meanwhile open all else; what is opened is closed with `stack`. Raises `START_ERRORS`."""
    starting = asyncio.create_task(engine.start())
    try:
        opened = await _open(config, engine, workers, stack)
    except BaseException:
        starting.cancel()  # which ends the engine
        await asyncio.gather(starting, return_exceptions=True)
        raise
    stack.push_async_callback(engine.close)
    ready = await starting
    report(ready)
    model, tokenizer, store, adapters = opened.model, opened.tokenizer, opened.store, opened.adapters
    tenants = TenantService(TenantStore(store.database), engine, adapters, workers)
    stack.push_async_callback(tenants.close)
    await tenants.start()
    await adapters.start()
    metrics.watch_engine(engine)
    prompts = Prompts(tokenizer, model.vocab_size, ready.max_model_len, workers)
    usage, directory = UsageService(store, workers), tenants.directory
    adapters.quota_of = lambda caller: directory.of_caller(caller).limits.quota
    adapters.share_pins(directory.part)
    checker = GrammarChecker(Path(config.engine.model), model.vocab_size, model.eos_token_ids)
    stack.push_async_callback(checker.close)
    accounts = Accounts(directory, Limiter(), usage, metrics)
    generation = Generation(
        tokenizer=tokenizer,
        prompts=prompts,
        engine=engine,
        adapters=adapters,
        accounts=accounts,
        guidance=GuidanceService(tokenizer, checker, workers),
        base_name=config.base_name,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        max_model_len=ready.max_model_len,
        workers=workers,
    )
    return Services(adapters, generation, prompts, engine, tenants, accounts, usage, created=int(time.time()))


async def _open(
    config: ServerConfig, engine: EngineClient, workers: Workers, stack: AsyncExitStack
) -> _Opened:
    folder = Path(config.engine.model)
    model = await workers.files(ModelConfig.load, folder)
    tokenizer = await workers.files(Tokenizer.load, folder)
    base = await workers.files(model.base_model, config.base_name, folder)
    store = await workers.files(
        AdapterStore.open,
        config.data_dir,
        base,
        database=config.database,
        blob_store=config.blob_store,
        reserved_names=(config.base_name,),
        max_rank=config.engine.max_lora_rank,
        max_bytes=config.max_adapter_bytes,
    )
    adapters = AdapterService(config, base, store, engine, workers)
    stack.push_async_callback(adapters.close)
    await adapters.refuse_name_of_base()
    return _Opened(model, tokenizer, store, adapters)


def report(ready: Ready) -> None:
    """Say in the log what is being served, in which form and why, and whatever the engine wants known."""
    weights = [] if ready.memory is None else ready.memory.weights
    logger.info(
        "base loaded",
        device=ready.device,
        dtype=ready.dtype,
        quantization=ready.quantization,
        reason=ready.quantization_reason,
        weight_bytes=ready.weight_bytes,
        bytes_per_weight={w.part: w.bytes_per_weight for w in weights if w.bytes_per_weight is not None},
        pool_bytes=ready.num_blocks * ready.block_bytes,
    )
    for note in ready.notes:
        logger.warning("note", note=note)
