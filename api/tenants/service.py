"""The service behind `/tenants`: who the tenants are, whom their keys let in, what the engine is told of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from ...core.client import EngineClient
from ...core.messages import TenantShare
from ...lora.errors import StoreError
from ..adapters.service import AdapterService
from ..errors import ApiError, invalid
from ..protocol.tenants import KeyCreate, KeyView, NewKey, TenantCreate, TenantPatch, patched, shown
from ..workers import Workers
from .directory import Directory
from .records import Limits, Tenant
from .store import Changed, TenantStore

T = TypeVar("T")

logger = structlog.get_logger(__name__)

FOLLOW_SECONDS = 0.25
"""How often the registry is asked whether anyone changed a tenant or key: within twice this, every server knows."""
LATEST = datetime(9999, 1, 1, tzinfo=UTC)
"""No key expires later: a database's client may see it in another time zone, and that day must exist as well."""
FLUSH_SECONDS = 10.0
"""How often it is noted when keys were last used."""


class TenantService:
    """Belongs to the event loop; the store runs in threads. What a call needs to be let in is in memory."""

    def __init__(
        self, store: TenantStore, engine: EngineClient, adapters: AdapterService, workers: Workers
    ) -> None:
        self.directory = Directory()
        self._store = store
        self._engine = engine
        self._adapters = adapters
        self._workers = workers
        self._revision = -1
        self._tasks: list[asyncio.Task[None]] = []

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Read the registry, tell the engine, and follow both from now on."""
        await self._refresh()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._keep_flushing())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(SQLAlchemyError, StoreError):  # it is a note, and the server has to end
            await self._flush()

    # ---------------------------------------------------------------- questions

    def tenant(self, name: str) -> Tenant:
        """As of the last change known here; asks no database. Raises `tenant_not_found`."""
        found = self.directory.tenant(name)
        if found is None:
            raise ApiError("tenant_not_found", f"there is no tenant {name!r}")
        return found

    async def known(self, name: str) -> Tenant:
        """As `tenant`, also for one that another server has only just made."""
        return self.directory.tenant(name) or await self.get(name)

    async def get(self, name: str) -> Tenant:
        """As the registry has it now, whichever server wrote it. Raises `tenant_not_found`."""
        await self._catch_up()
        return self.tenant(name)

    async def all(self) -> list[Tenant]:
        """By name, as the registry has them now."""
        await self._catch_up()
        return self.directory.tenants

    # ---------------------------------------------------------------- tenants

    async def create(self, body: TenantCreate) -> Tenant:
        """Raises `tenant_exists`."""
        weight = 1.0 if body.weight is None else body.weight
        made = await self._workers.changes(self._store.create, body.name, weight, body.limits or Limits())
        await self._apply(made, self._put)
        return made.value

    async def change(self, name: str, body: TenantPatch) -> Tenant:
        """Raises `tenant_not_found`."""

        def limits(now: Limits) -> Limits:
            return now if body.limits is None else patched(now, body.limits)

        changed = await self._workers.changes(self._store.change, name, body.weight, limits)
        await self._apply(changed, self._put)
        return changed.value

    async def remove(self, name: str) -> None:
        """With its keys, adapters and usage. Its requests under way finish, on the weights they began with."""
        removed = await self._workers.changes(self._store.remove, name)
        await self._apply(removed, lambda _: self._drop(name))
        await self._adapters.removed_with_tenant(removed.value)

    # ---------------------------------------------------------------- keys

    async def create_key(self, tenant: str, body: KeyCreate) -> NewKey:
        """Raises `tenant_not_found`, `invalid_request` where it would have expired already."""
        expires_at = None if body.expires_at is None else _later(body.expires_at)
        made = await self._workers.changes(self._store.create_key, tenant, body.description, expires_at)
        await self._apply(made, lambda value: self.directory.put_key(value[0]))
        key, text = made.value
        return NewKey(key=text, **shown(key, None))

    async def keys(self, tenant: str) -> list[KeyView]:
        """Raises `tenant_not_found`."""
        found = await self._workers.registry(self._store.keys, tenant)
        return [KeyView(**shown(key, self.directory.last_used(key))) for key in found]

    async def revoke(self, tenant: str, key_id: str) -> None:
        """When this returns, the key opens nothing at this server. Raises `tenant_not_found`."""
        revoked = await self._workers.changes(self._store.revoke, tenant, key_id)
        if revoked is None:
            # Not repeated: who mistakes a key for its id gets no secret into anyone's terminal.
            raise ApiError("tenant_not_found", f"tenant {tenant!r} has no key of this id")
        await self._apply(revoked, self.directory.put_key)

    # ---------------------------------------------------------------- the registry and the engine

    async def _catch_up(self) -> None:
        """Take over what any server changed until now."""
        if await self._workers.registry(self._store.revision) != self._revision:
            await self._refresh()

    async def _apply(self, changed: Changed[T], put: Callable[[T], None]) -> None:
        """Take over what this server changed: alone, where it is the next change; else with all that came between."""
        if changed.revision == self._revision + 1:
            self._revision = changed.revision
            put(changed.value)
        elif changed.revision > self._revision:
            await self._refresh()

    async def _refresh(self) -> None:
        """Take over all that the registry has. Of two that run at once the later reading stays."""
        snapshot = await self._workers.registry(self._store.snapshot)
        if snapshot.revision < self._revision:
            return
        before = {tenant.name: tenant for tenant in self.directory.tenants}
        self._revision = snapshot.revision
        self.directory.replace(snapshot.tenants, snapshot.keys)
        for old in before.values():
            now = self.directory.tenant(old.name)
            if now is None or now.key != old.key:  # another one of that name is a stranger
                self._engine.forget_tenant(old.key)
        for tenant in snapshot.tenants:
            if before.get(tenant.name) != tenant:
                self._put(tenant)

    def _drop(self, name: str) -> None:
        dropped = self.directory.drop_tenant(name)
        if dropped is not None:
            self._engine.forget_tenant(dropped.key)

    def _put(self, tenant: Tenant) -> None:
        self.directory.put_tenant(tenant)
        self._engine.set_tenant(
            TenantShare(
                name=tenant.key,
                weight=tenant.weight,
                pool_share=tenant.limits.pool_share,
                queued_requests=tenant.limits.queued_requests,
            )
        )

    async def _follow(self) -> None:
        """Take over what other servers of this registry change, until cancelled."""
        seen = None
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            revision = (
                self._store.any_revision_at_once()
            )  # before: what changes meanwhile counts the next time
            if revision is not None and revision == seen:
                continue
            try:
                await self._catch_up()
                seen = revision
            except (SQLAlchemyError, StoreError) as error:  # the next round tries again
                logger.warning("the registry's tenants are not known", reason=str(error))

    async def _keep_flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self._flush()
            except (SQLAlchemyError, StoreError) as error:  # it is kept, and written the next time
                logger.warning("the last use of keys is not written", reason=str(error))

    async def _flush(self) -> None:
        used = self.directory.take_used()
        if not used:
            return
        try:
            await self._workers.changes(self._store.mark_used, used)
        except BaseException:
            self.directory.put_back(used)
            raise


def _later(moment: datetime) -> datetime:
    """The moment in UTC, if it lies ahead."""
    try:
        moment = moment.astimezone(UTC)
    except OverflowError as error:
        raise invalid("expires_at is out of range", "expires_at") from error
    if moment >= LATEST:
        raise invalid("expires_at is out of range", "expires_at")
    if moment <= datetime.now(UTC):
        raise invalid("expires_at lies in the past", "expires_at")
    return moment
