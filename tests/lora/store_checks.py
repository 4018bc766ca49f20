"""What the store's tests share besides fixtures."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from heddle.lora.errors import StoreError
from heddle.lora.schema import TenantRow
from heddle.lora.store import AdapterStore


def add_tenant(store: AdapterStore, name: str) -> None:
    store._database.write(lambda session: session.add(TenantRow(name=name, created_at=datetime.now(UTC))))


def refused(code: str, call: Callable[[], object]) -> StoreError:
    with pytest.raises(StoreError) as error:
        call()
    assert error.value.code == code
    return error.value


def blob_files(tmp_path: Path) -> int:
    return len(list((tmp_path / "data" / "blobs").rglob("*.safetensors")))
