"""What the store's tests share besides fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
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


@contextmanager
def gone(database: str) -> Iterator[None]:
    """While it lasts, nobody can use this database of a PostgreSQL server."""
    url = sa.make_url(database)
    admin = sa.create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS false")
        connection.exec_driver_sql(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{url.database}'"
        )
        yield
        connection.exec_driver_sql(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS true")
    admin.dispose()
