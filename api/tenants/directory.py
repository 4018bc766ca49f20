"""Tenants and keys in memory, as the registry last had them: what every call asks, without a database."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..errors import ApiError
from .keys import is_key, prefix_of, sha256_of
from .records import Key, Tenant

if TYPE_CHECKING:
    from .auth import Caller


class Directory:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, list[Key]] = {}
        """By what they begin with, which is no secret: no search compares secrets but in constant time."""
        self._used: dict[str, datetime] = {}

    def replace(self, tenants: Iterable[Tenant], keys: Iterable[Key]) -> None:
        """These are all there are."""
        self._tenants = {tenant.name: tenant for tenant in tenants}
        found: dict[str, list[Key]] = {}
        for key in keys:
            found.setdefault(key.prefix, []).append(key)
        self._keys = found

    def put_tenant(self, tenant: Tenant) -> None:
        """A new one, or one that was changed."""
        self._tenants[tenant.name] = tenant

    def drop_tenant(self, name: str) -> Tenant | None:
        """It and all its keys: a later tenant of that name must not be opened by them. Returns it, if it was known."""
        dropped = self._tenants.pop(name, None)
        left = ([key for key in keys if key.tenant != name] for keys in self._keys.values())
        self._keys = {keys[0].prefix: keys for keys in left if keys}
        return dropped

    def put_key(self, key: Key) -> None:
        """A new one, or one that was changed."""
        others = [other for other in self._keys.get(key.prefix, ()) if other.id != key.id]
        self._keys[key.prefix] = [*others, key]

    @property
    def tenants(self) -> list[Tenant]:
        """By name."""
        return sorted(self._tenants.values(), key=lambda tenant: tenant.name)

    def tenant(self, name: str) -> Tenant | None:
        return self._tenants.get(name)

    def part(self, name: str) -> float:
        """A tenant's part by weight among all there are; 0: there is no such tenant."""
        tenant = self._tenants.get(name)
        return 0.0 if tenant is None else tenant.weight / sum(one.weight for one in self._tenants.values())

    def of_caller(self, caller: Caller) -> Tenant:
        """The tenant on whose behalf a call is made. Raises `tenant_not_found` where it was removed meanwhile, also
        if there is one of its name again."""
        found = self._tenants.get(caller.tenant)
        if found is None or caller.key not in (None, found.key):
            raise ApiError("tenant_not_found", f"tenant {caller.tenant!r} was removed during the call")
        return found

    def opened_by(self, text: str) -> Tenant | None:
        """The tenant whose key this is; None where it is nobody's, expired or revoked."""
        if not is_key(text):
            return None
        digest, now = sha256_of(text), datetime.now(UTC)
        for key in self._keys.get(prefix_of(text), ()):
            if hmac.compare_digest(key.sha256, digest) and key.opens(now) and key.tenant in self._tenants:
                self._used[key.id] = now
                return self._tenants[key.tenant]
        return None

    def take_used(self) -> dict[str, datetime]:
        """When each key was last used since the last time this was asked, by its id."""
        used, self._used = self._used, {}
        return used

    def put_back(self, used: dict[str, datetime]) -> None:
        """What `take_used` gave out could not be written."""
        self._used = used | self._used

    def last_used(self, key: Key) -> datetime | None:
        """With what is not written yet."""
        return self._used.get(key.id, key.last_used_at)
