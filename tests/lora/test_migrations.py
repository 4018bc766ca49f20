"""The registry's tables, from nothing and from every earlier form of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from heddle.lora import database as registry_database
from heddle.lora.schema import Table
from heddle.lora.store import AdapterStore

SCRIPTS = Config()
SCRIPTS.set_main_option("script_location", str(Path(registry_database.__file__).parent / "migrations"))
REVISIONS = [script.revision for script in ScriptDirectory.from_config(SCRIPTS).walk_revisions()][::-1]
WHEN = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
EARLIEST_ROWS = {
    "installation": {"id": "0" * 32},
    "tenants": {"id": 1, "name": "public", "created_at": WHEN},
    "adapters": {
        "id": 7, "public_id": "adapter-7", "tenant_id": 1, "name": "old", "pinned": True, "description": "d",
        "current": 3, "last_number": 4, "created_at": WHEN,
    },
    "versions": {
        "id": 9, "adapter_id": 7, "number": 3, "digest": "sha256:" + "a" * 64, "fingerprint": "f",
        "base_model": "b", "rank": 2, "target_modules": ["q_proj"], "size_bytes": 64, "dtype": "F32",
        "max_abs": 1.5, "matched": 2, "total": 2, "warnings": [], "source": None, "created_at": WHEN,
    },
    "usage": {
        "version_id": 9, "requests": 5, "prompt_tokens": 6, "generated_tokens": 7, "last_used_at": WHEN,
    },
}  # fmt: skip
"""What a registry of the first revision could hold."""


@pytest.fixture
def engine(database: str | None, tmp_path: Path) -> sa.Engine:
    """The registry's database, before or beside the store."""
    (tmp_path / "data").mkdir(exist_ok=True)
    return sa.create_engine(database or f"sqlite:///{tmp_path}/data/registry.sqlite")


def test_the_migrations_make_just_the_tables_of_the_schema(store: AdapterStore, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    engine.dispose()


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_registry_of_every_earlier_revision_is_brought_up_to_date_with_all_it_holds(
    revision: str, engine: sa.Engine, open_store: Callable[..., AdapterStore]
) -> None:
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(SCRIPTS.get_main_option("script_location")))
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        tables = sa.MetaData()
        tables.reflect(connection)
        for name, row in EARLIEST_ROWS.items():
            connection.execute(tables.tables[name].insert().values(row))
    store = open_store()
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    engine.dispose()
    (record,) = store.all_versions()
    assert (record.id, record.reference, record.pinned, record.description) == (
        "adapter-7",
        "old@3",
        True,
        "d",
    )
    assert (record.status, record.digest, record.created_at) == ("incompatible", "sha256:" + "a" * 64, WHEN)
    assert (record.requests, record.prompt_tokens, record.generated_tokens) == (5, 6, 7)
    assert store.revision() == 0
    store.patch("old", pinned=False)
    assert store.revision() == 1


def test_commits_are_durable_and_references_enforced(store: AdapterStore) -> None:
    def setting(query: str) -> object:
        return store._database.write(lambda session: session.execute(sa.text(query)).scalar())

    if store._database._sqlite:
        assert setting("PRAGMA journal_mode") == "wal"
        assert setting("PRAGMA synchronous") == 2
        assert setting("PRAGMA foreign_keys") == 1
    else:
        assert setting("SHOW synchronous_commit") == "on"
