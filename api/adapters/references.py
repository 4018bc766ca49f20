"""What is said of `name@version` and `name@digest` where they mean nothing, or where a name is wanted."""

from __future__ import annotations

from ...lora.errors import StoreError
from ...lora.records import AdapterRecord
from ...lora.registry import Reference
from ..errors import ApiError, invalid


def not_found(error: StoreError, ref: str) -> StoreError:
    """`error`, met at looking for `ref`. Where it says that there is none, also how one is written, if it is not so."""
    reference = Reference(ref)
    if error.code != "adapter_not_found" or reference.bare or reference.valid:
        return error
    how = "behind the @ stands a version, of up to 9 digits, or 12 or more hex digits of a digest"
    return StoreError(error.code, f"{error.message}: {how}", error.param)


def names_one_version(record: AdapterRecord, what: str, instead: str) -> ApiError:
    """`record` was meant by more than its name, and `what` is of all versions together."""
    message = f"{record.reference} is one version of adapter {record.name}, and {what}: {instead}"
    return invalid(message, "name")
