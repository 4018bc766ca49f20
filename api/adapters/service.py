"""The service behind `/adapters`: registry, files and engine brought together.

The store says which versions there are, the engine where their bytes are now; every answer merges the two.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast
from weakref import WeakValueDictionary

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from ...core.client import EngineClient
from ...lora import sources
from ...lora.base import BaseModel
from ...lora.errors import AdapterInvalid, StoreError
from ...lora.layout import PoolDtype, blocks_of
from ...lora.quota import Quota
from ...lora.records import AdapterRecord, Registration
from ...lora.store import UNLIMITED, AdapterStore
from ..config import ServerConfig
from ..errors import ApiError
from ..protocol.adapters import Adapter, AdapterCreate, AdapterPatch
from ..tenants.auth import PUBLIC, Caller
from ..turns import in_turns
from ..workers import Pool, Workers
from . import references
from .engine_adapters import EngineAdapters
from .holds import Holds
from .receipts import receipt
from .scratch import Scratch

logger = structlog.get_logger(__name__)

FLUSH_SECONDS = 5.0
"""How often counted usage is written to the registry."""


class AdapterService:
    """Register, find, move and remove adapters. Belongs to the event loop; the store runs in threads."""

    def __init__(
        self,
        config: ServerConfig,
        base: BaseModel,
        store: AdapterStore,
        engine: EngineClient,
        workers: Workers,
    ) -> None:
        self._config = config
        self._base = base
        self._store = store
        self._engine = engine
        self._workers = workers
        self._holds = Holds(store, workers.registry)
        self._loaded = EngineAdapters(store, engine, workers, self._holds)
        self._tasks: set[asyncio.Task[object]] = set()
        self._changing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._scratch = Scratch(config.data_dir / "uploads")
        self.quota_of: Callable[[Caller], Quota] = lambda _caller: UNLIMITED
        """How much a caller may register; raises `tenant_not_found` for one whose tenant is gone. What the operator
        registers at the start is not held to it."""

    def share_pins(self, part: Callable[[str], float]) -> None:
        """From now on a tenant's pins hold at most this part of what all may hold."""
        self._loaded.pin_part = part

    # ---------------------------------------------------------------- life

    async def refuse_name_of_base(self) -> None:
        """Raises `adapter_exists` where an adapter has the name that the base is served under now."""
        for record in await self._workers.registry(self._store.list, None):
            if record.name == self._config.base_name:
                message = f"an adapter of tenant {record.tenant} has the base's name {record.name!r}; "
                raise ApiError("adapter_exists", message + "serve it under another (--served-model-name)")

    async def start(self) -> None:
        """Bring back what is pinned, and register the adapters of the settings.

        The engine hears of every other adapter when it is first used: a registry may hold thousands, and
        their files may lie far away.
        """
        await self._workers.files(self._scratch.open)
        for record in await self._workers.registry(self._store.pinned):
            self._in_background(self._loaded.preload(record))
        for name, source in self._config.adapters:
            await self._register_at_start(name, source)
        for name, source in self._config.shipped_adapters:
            current = await self._current(name, self._config.tenant)
            if current is None or current.status != "ready":
                await self._register_at_start(name, source)
        self._in_background(self._flush_usage())
        self._in_background(self._loaded.follow())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._holds.close()
        await self._workers.changes(self._store.close)
        self._scratch.close()

    async def _register_at_start(self, name: str, source: str) -> None:
        """For the operator: any local folder, and other weights make a new version of the name."""
        create = AdapterCreate(name=name, source=source, replace=True)
        operator = Caller(self._config.tenant, is_admin=True)
        try:
            if sources.is_hub(source):
                await self.create_from_source(create, operator)
            else:
                await self._create(create, Path(source), operator, source)
        except AdapterInvalid as error:
            raise AdapterInvalid(f"--adapter {name}={source}: {error}") from error
        except StoreError as error:
            raise StoreError(error.code, f"--adapter {name}={source}: {error}", error.param) from error

    # ---------------------------------------------------------------- registration

    @property
    def upload_threads(self) -> Pool:
        """Who writes an upload to disk."""
        return self._workers.files

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        """A folder for one registration's files, gone afterwards."""
        folder = await self._workers.files(self._scratch.new)
        try:
            yield folder
        finally:
            await self._workers.files(shutil.rmtree, folder, ignore_errors=True)

    async def create_from_source(
        self, create: AdapterCreate, caller: Caller, dry_run: bool = False
    ) -> tuple[Adapter, bool]:
        """Register what lies at `create.source`. Returns the receipt, and whether a version was made."""
        if create.source is None:
            raise ApiError("invalid_request", "source is missing", "source")
        quota = self.quota_of(caller)
        # Among the registrations' own work: a hundred such questions at once would keep everybody's waiting.
        await self._workers.files(self._store.check_room, create.name, caller.tenant, quota)
        pool = self._workers.downloads if sources.is_hub(create.source) else self._workers.files
        async with self.scratch() as folder:
            await pool(
                sources.fetch,
                create.source,
                self._config.adapter_roots,
                folder,
                max_bytes=self._config.max_adapter_bytes,
            )
            return await self._create(create, folder, caller, create.source, dry_run)

    async def create_from_upload(
        self, create: AdapterCreate, folder: Path, caller: Caller, dry_run: bool = False
    ) -> tuple[Adapter, bool]:
        """Register the uploaded files in `folder`."""
        if create.source is not None:
            raise ApiError("invalid_request", "an upload has no source", "source")
        return await self._create(create, folder, caller, None, dry_run)

    async def _create(
        self, create: AdapterCreate, folder: Path, caller: Caller, source: str | None, dry_run: bool = False
    ) -> tuple[Adapter, bool]:
        given: dict[str, Any] = {
            "name": create.name,
            "tenant": caller.tenant,
            "replace": bool(create.replace),
            "description": create.description,
            "source": source,
            "quota": self.quota_of(caller),
        }
        if dry_run:
            planned = await self._workers.files(self._store.register, folder, dry_run=True, **given)
            return self._view(planned.record, self._planned_blocks(planned)), False
        async with self._changes_of(caller.tenant, create.name):
            registration = await self._register(folder, create.pinned, given)
        record = registration.record
        self._holds.returned(record.digest)
        await self._loaded.file_is_back(record)
        adapter = None
        if create.preload:
            reason = await self._loaded.preload(record)
            adapter = self._view(record)
            if reason is not None:
                adapter.warnings = [*adapter.warnings, f"not preloaded: {reason}"]
        elif create.preload is None:
            self._in_background(self._loaded.preload(record))
        return adapter or self._view(record), registration.created

    async def _register(self, folder: Path, pinned: bool | None, given: dict[str, Any]) -> Registration:
        """Register; what is to be pinned is pinned in the engine first, so that a version the pool has no room for
        never comes to be."""
        current = await self._current(given["name"], given["tenant"])
        if not (pinned or (pinned is None and current is not None and current.pinned)):
            registration = await self._workers.files(self._store.register, folder, pinned=pinned, **given)
            if pinned is not None:
                await self._loaded.sync_pins()
            return registration
        staged = await self._workers.files(self._store.stage, folder, **given)
        try:
            async with self._loaded.moving_pin(staged, instead_of=current):
                return await self._workers.files(self._store.register, folder, pinned=pinned, **given)
        except BaseException:  # a cancelled call too: what was staged for it has to go
            await self._workers.registry(self._holds.removed_elsewhere, [staged.digest])
            await self._loaded.free()
            raise

    async def _current(self, name: str, tenant: str) -> AdapterRecord | None:
        """The name's current version, if it has one."""
        try:
            return await self._workers.registry(self._store.get, name, tenant)
        except StoreError:
            return None

    def _changes_of(self, tenant: str, name: str) -> asyncio.Lock:
        """Held while a name's versions and pin change, in registry and engine."""
        return self._changing.setdefault((tenant, name), asyncio.Lock())

    def _planned_blocks(self, registration: Registration) -> int:
        ready = self._engine.ready
        if ready is None:
            raise ApiError("overloaded", "the engine is restarting; try again in a few seconds")
        return blocks_of(
            registration.spec,
            self._base,
            widest=cast(PoolDtype, ready.dtype),
            any_form=ready.any_adapter_form,
            block_bytes=ready.block_bytes,
        )

    # ---------------------------------------------------------------- questions

    async def all_of(self, caller: Caller) -> list[Adapter]:
        """Every name's current version: all tenants' for the admin, else what the caller can use."""
        if caller.is_admin:
            return await self._views(await self._workers.registry(self._store.list, None))
        return await self.usable(caller)

    async def usable(self, caller: Caller) -> list[Adapter]:
        """The current versions a request of the caller can name: its own, then public's of other names."""
        records = await self._workers.registry(self._store.list, caller.tenant)
        if caller.tenant != PUBLIC:
            own = {record.name for record in records}
            public = await self._workers.registry(self._store.list, PUBLIC)
            records = records + [record for record in public if record.name not in own]
        return await self._views(records)

    async def get(self, ref: str, caller: Caller) -> Adapter:
        """The caller's own, then public's. Raises StoreError `adapter_not_found`."""
        return self._view(await self._get(ref, caller, shared=True))

    async def versions(self, name: str, caller: Caller) -> list[Adapter]:
        """Of the caller's own, then public's. Raises StoreError `adapter_not_found`, `invalid_request` for one
        version."""
        if "@" in name:
            record = await self._get(name, caller, shared=True)
            instead = f"list them with GET /adapters/{record.name}/versions"
            raise references.names_one_version(record, "versions are a name's", instead)
        records = await self._workers.registry(self._store.versions, name, caller.tenant, shared=True)
        return await self._views(records)

    async def _get(self, ref: str, caller: Caller, *, shared: bool = False) -> AdapterRecord:
        try:
            return await self._workers.registry(self._store.get, ref, caller.tenant, shared=shared)
        except StoreError as error:
            raise references.not_found(error, ref) from error

    async def _version(self, name: str, version: int, caller: Caller) -> AdapterRecord:
        """That version of a name that is there; raises StoreError naming `version`."""
        try:
            return await self._get(f"{name}@{version}", caller)
        except StoreError as error:
            raise StoreError(error.code, error.message, "version") from error

    # ---------------------------------------------------------------- changes

    async def patch(self, name: str, patch: AdapterPatch, caller: Caller) -> Adapter:
        """Change pin, description or current version of a name; `pin_limit` where no more may be pinned,
        `invalid_request` where one version is named."""
        async with self._changes_of(caller.tenant, name):
            record = await self._get(name, caller)
            if "@" in name:
                instead = (
                    f'send it to {record.name}; {{"version": {record.version}}} in it makes this one current'
                )
                raise references.names_one_version(record, "pin and description are its name's", instead)
            target = record if patch.version is None else await self._version(name, patch.version, caller)
            fields = msgspec.structs.asdict(patch)
            change = functools.partial(self._store.patch, name, caller.tenant, **fields)
            if record.pinned if patch.pinned is None else patch.pinned:
                async with self._loaded.moving_pin(target, instead_of=record):
                    record = await self._workers.changes(change)
            else:
                record = await self._workers.changes(change)
                if patch.pinned is not None or patch.version is not None:
                    await self._loaded.sync_pins()
        return self._view(record)

    async def load(self, ref: str, caller: Caller) -> Adapter:
        record = await self._get(ref, caller)
        await self._loaded.load(record)
        return self._view(record)

    async def evict(self, ref: str, to: Literal["host", "disk"], caller: Caller) -> Adapter:
        record = await self._get(ref, caller)
        if self._holds.count(record.digest) or await self._loaded.pinned_by_others(record):
            raise ApiError("adapter_in_use", f"adapter {record.reference} is in use, and stays where it is")
        await self._loaded.evict(record, to)
        return self._view(record)

    async def remove(self, ref: str, caller: Caller) -> None:
        """Requests that use a removed version go on; its memory and files are freed after the last one.

        Raises `pin_limit` where the name is pinned and the version that would become current has no room among
        the pins: nothing is removed then.
        """
        name, at, _ = ref.partition("@")
        async with self._changes_of(caller.tenant, name):
            removed = await self._get(ref, caller) if at else None
            successor = None if removed is None else await self._pinned_next(removed, caller)
            moving = nullcontext() if successor is None else self._loaded.moving_pin(successor, removed)
            async with moving:
                removal = await self._workers.changes(self._holds.remove, ref, caller.tenant)
            await self._loaded.free()
            if successor is None and any(record.pinned for record in removal.removed):
                await self._loaded.sync_pins()

    async def _pinned_next(self, removed: AdapterRecord, caller: Caller) -> AdapterRecord | None:
        """What becomes current, and pinned, when this version goes; None: nothing that can be pinned."""
        if not removed.pinned:
            return None
        versions = await self._workers.registry(self._store.versions, removed.name, caller.tenant)
        others = [record for record in versions if record.version != removed.version]
        successor = max(others, key=lambda record: record.version or 0, default=None)
        return successor if successor is not None and successor.status == "ready" else None

    async def removed_with_tenant(self, digests: list[str]) -> None:
        """Let go of what no version names any more since a tenant with versions of these `digests` was removed."""
        await self._workers.registry(self._holds.removed_elsewhere, digests)
        await self._loaded.free()
        await self._loaded.sync_pins()

    # ---------------------------------------------------------------- use by requests

    async def hold(self, ref: str, tenant: str) -> AdapterRecord:
        """The version a request means by `ref`, kept from disappearing until `release`.

        Raises StoreError `model_not_found`, `adapter_invalid` for one made for another base.
        """
        record = await self._holds.resolve(ref, tenant)
        try:
            await self._loaded.know(record)
        except BaseException:
            self.release(record)
            raise
        return record

    def release(self, record: AdapterRecord) -> None:
        if self._holds.release(record.digest):
            self._in_background(self._loaded.free())

    # ---------------------------------------------------------------- the rest

    async def _views(self, records: Sequence[AdapterRecord]) -> list[Adapter]:
        """Of any number of them, in turns with requests' work."""
        return await in_turns(records, self._view)

    def _view(self, record: AdapterRecord, planned_blocks: int | None = None) -> Adapter:
        state = self._loaded.state(record.digest)
        warnings = self._loaded.warnings(record.digest)
        return receipt(record, state, self._holds.count(record.digest), planned_blocks, warnings)

    async def _flush_usage(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self._workers.changes(self._store.usage.flush)
            except (
                SQLAlchemyError,
                StoreError,
            ) as error:  # what was counted is kept, and written the next time
                logger.warning("usage not written", reason=str(error))

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
