"""What is counted of requests, and in which accounts. Control code: no torch."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from .records import AdapterRecord


class Usage(msgspec.Struct, frozen=True):
    """What was counted and is not in the registry yet."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's, those that were found in the prefix cache."""
    last_used_at: datetime = datetime.min.replace(tzinfo=UTC)

    @property
    def nothing(self) -> bool:
        return not (self.requests or self.prompt_tokens or self.generated_tokens or self.cached_tokens)

    def plus(self, other: Usage, sign: int = 1) -> Usage:
        """The sum, or with sign -1 what is left of self after `other` was written; the later moment stays."""
        return Usage(
            self.requests + sign * other.requests,
            self.prompt_tokens + sign * other.prompt_tokens,
            self.generated_tokens + sign * other.generated_tokens,
            self.cached_tokens + sign * other.cached_tokens,
            max(self.last_used_at, other.last_used_at),
        )


class OfVersion(NamedTuple):
    """The account of an adapter's version, whoever used it."""

    version_id: int


class OfTenant(NamedTuple):
    """The account of a tenant, whatever it used: of the one that was made at `since`, and no other of its name."""

    tenant: str
    since: datetime


class OfAdapter(NamedTuple):
    """The account of a tenant's use of one adapter, own or public; of the base alone where both are empty."""

    tenant: str
    since: datetime
    owner: str
    adapter: str


Account = OfVersion | OfTenant | OfAdapter


def accounts(tenant: str, since: datetime, records: Iterable[AdapterRecord]) -> set[Account]:
    """Where a request of the `tenant` that was made at `since` on these adapters (none: on the base alone) is counted,
    once each."""
    found: set[Account] = {OfTenant(tenant, since)}
    for record in records:
        found.add(OfAdapter(tenant, since, record.tenant, record.name))
        if record.version_id is not None:
            found.add(OfVersion(record.version_id))
    return found if len(found) > 1 else found | {OfAdapter(tenant, since, "", "")}
