"""Which adapter versions a request runs on: its `model` and `adapter` fields, made out and held."""

from __future__ import annotations

import msgspec
from msgspec import UnsetType

from ...core.messages import AdapterUse
from ...lora.errors import StoreError
from ...lora.records import AdapterRecord
from ..adapters.service import AdapterService
from ..errors import ApiError, invalid
from ..protocol.generation import WeightedAdapter
from ..tenants.auth import Caller
from ..tenants.records import key_of

MAX_ADAPTERS = 32
"""Of one request."""
MAX_WEIGHT = 1000.0

AdapterField = str | list[WeightedAdapter] | UnsetType | None


class Selection(msgspec.Struct, frozen=True):
    """What a request runs on. `records` and `weights` go together; both empty: the base alone."""

    model: str
    """As the answer repeats it."""
    records: tuple[AdapterRecord, ...] = ()
    weights: tuple[float, ...] = ()
    several: bool = False
    """The request gave a list."""

    label: str | list[str] | None = None
    """The answer's field `adapter`: made from the others."""

    def __post_init__(self) -> None:
        names = [record.reference for record in self.records]
        label = names if self.several else names[0] if names else None
        msgspec.structs.force_setattr(self, "label", label)  # once: a stream repeats it with every token

    @property
    def uses(self) -> list[AdapterUse]:
        """For the engine: one entry a digest. Names of equal weights share one, with their weights added."""
        total: dict[str, float] = {}
        for record, weight in zip(self.records, self.weights):
            total[record.digest] = total.get(record.digest, 0.0) + weight
        return [AdapterUse(digest, weight) for digest, weight in total.items()]


class Selecting:
    """A context; what is selected in it is held until it ends."""

    def __init__(self, service: AdapterService, base_name: str, caller: Caller) -> None:
        self._service = service
        self._base_name = base_name
        self._caller = caller
        self._held: list[AdapterRecord] = []

    def __enter__(self) -> Selecting:
        return self

    def __exit__(self, *_: object) -> None:
        for record in self._held:
            self._service.release(record)

    async def selected(self, model: str | None, adapter: AdapterField) -> Selection:
        """Raises `model_not_found` for any name that is unknown to the caller, `invalid_request` where `model` names
        an adapter and `adapter` says otherwise.
        """
        by_model = None if model is None or model == self._base_name else await self._hold(model, "model")
        named = model if model is not None else self._base_name
        if isinstance(adapter, UnsetType):
            return Selection(named) if by_model is None else Selection(named, (by_model,), (1.0,))
        entries = _entries(adapter)
        records = [await self._hold(entry.name, "adapter") for entry in entries]
        weights = tuple(entry.weight for entry in entries)
        if by_model is not None and not _same(by_model, records, weights):
            raise invalid(
                f"model {model!r} names an adapter, and the field adapter says otherwise", "adapter"
            )
        return Selection(named, tuple(records), weights, several=isinstance(adapter, list))

    async def _hold(self, ref: str, param: str) -> AdapterRecord:
        try:
            record = await self._service.hold(ref, self._caller.tenant)
        except StoreError as error:
            if error.code != "model_not_found":
                raise
            raise ApiError("model_not_found", f"there is no model or adapter {ref!r}", param) from error
        self._held.append(record)
        if record.tenant == self._caller.tenant and not _is_own(record, self._caller):
            raise ApiError("model_not_found", f"there is no model or adapter {ref!r}", param)
        return record


def _is_own(record: AdapterRecord, caller: Caller) -> bool:
    """False where the caller's tenant was removed and another one made under its name."""
    since = record.tenant_since
    return caller.key is None or since is None or caller.key == key_of(record.tenant, since)


def _entries(adapter: str | list[WeightedAdapter] | None) -> list[WeightedAdapter]:
    if adapter is None:
        return []
    if isinstance(adapter, str):
        return [WeightedAdapter(adapter)]
    if not 1 <= len(adapter) <= MAX_ADAPTERS:
        raise invalid(f"adapter: a list names 1 to {MAX_ADAPTERS} adapters, got {len(adapter)}", "adapter")
    for entry in adapter:
        if not abs(entry.weight) <= MAX_WEIGHT:
            raise invalid(f"adapter: weights lie between -{MAX_WEIGHT:g} and {MAX_WEIGHT:g}", "adapter")
    return adapter


def _same(record: AdapterRecord, records: list[AdapterRecord], weights: tuple[float, ...]) -> bool:
    return [r.version_id for r in records] == [record.version_id] and weights == (1.0,)
