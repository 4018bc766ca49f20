"""Opens the registry's database: SQLite or PostgreSQL, its tables brought up to date, and transactions on
it."""

from __future__ import annotations

import contextlib
import os
import random
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session

from . import durable
from .errors import StoreError
from .revision import RevisionReader
from .schema import InstallationRow, TenantRow

T = TypeVar("T")

BUSY_SECONDS = 30
"""How long a writer waits for SQLite's one writer before it."""
_RETRIES = 20
_UPGRADE_LOCK = 0x6865_6464_6C65
"""Key of PostgreSQL's advisory lock around upgrades."""


class Database:
    """Transactions on the registry. Thread-safe.

    Raises StoreError invalid_request if there is no database at `url` that can be used.
    """

    def __init__(self, url: str | sa.URL) -> None:
        try:
            parsed = _with_driver(sa.make_url(url))
            self._sqlite = parsed.get_backend_name() == "sqlite"
            file = Path(parsed.database).absolute() if self._sqlite and parsed.database else None
            if file is not None:
                durable.make_folder(file.parent, mode=0o700)
                _make_private(file)
            options = {"connect_args": {"timeout": BUSY_SECONDS}} if self._sqlite else {"pool_pre_ping": True}
            self._engine = sa.create_engine(parsed, **options)
            if self._sqlite:
                event.listen(self._engine, "connect", _prepare_sqlite)
                event.listen(self._engine, "begin", _begin_sqlite)
            self._writer = self._engine.execution_options(writes=True)
            self._upgrade()
            if file is not None:
                durable.sync_folder(file.parent)
            self._revision = RevisionReader(file) if file is not None and file.is_file() else None
        except (sa.exc.ArgumentError, DBAPIError, ImportError, OSError) as error:
            reason = _reason(error)
            raise StoreError(
                "invalid_request", f"the database cannot be used: {reason}", "database"
            ) from error

    def close(self) -> None:
        if self._revision is not None:
            self._revision.close()
        self._engine.dispose()

    def revision_at_once(self) -> int | None:
        """The committed revision without waiting, in microseconds; None where that cannot be had: only a SQLite
        file gives it."""
        return None if self._revision is None else self._revision.read()

    def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` on one consistent view of the data; it must not write."""
        try:
            with Session(self._engine) as session:
                return work(session)
        except OperationalError as error:
            raise _unavailable(error) from error

    def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction; where it collides with another one, both start over, one after the
        other.

        `work` may thus run several times and must have no effect outside the session that it cannot repeat.
        """
        for attempt in range(_RETRIES):
            try:
                with Session(self._writer, expire_on_commit=False) as session, session.begin():
                    session.connection()  # begins now, not at the first query: holds SQLite's lock from here
                    return work(session)
            except (IntegrityError, OperationalError) as error:
                if attempt == _RETRIES - 1 or not _collided(error):
                    if isinstance(error, OperationalError):
                        raise _unavailable(error) from error
                    raise
                time.sleep(random.uniform(0.001, 0.01) * 2 ** min(attempt, 6))
        raise AssertionError("unreachable")

    def lock(self, session: Session, key: str) -> None:
        """Until the transaction ends nobody else holds the lock `key`. (SQLite has one writer at a time
        anyhow.)"""
        if not self._sqlite:
            number = int.from_bytes(bytes.fromhex(key.removeprefix("sha256:"))[:8], "big", signed=True)
            session.execute(sa.select(sa.func.pg_advisory_xact_lock(number)))

    def installation(self) -> str:
        """Which registry this is: a random name, made once."""
        return self.read(lambda session: session.scalars(sa.select(InstallationRow.id)).one())

    def _upgrade(self) -> None:
        """Apply missing migrations and the rows that always exist; one process at a time."""
        config = Config()
        config.set_main_option(
            "script_location", str(Path(__file__).parent / "migrations").replace("%", "%%")
        )
        with self._writer.begin() as connection:
            if not self._sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            with Session(connection) as session:
                if session.scalars(sa.select(InstallationRow)).first() is None:
                    session.add(InstallationRow(id=uuid.uuid4().hex))
                    session.add(TenantRow(name="public", created_at=datetime.now(UTC)))
                session.commit()


def _make_private(file: Path) -> None:
    """Hashes of keys lie in it: whoever else has an account on this machine has no business there. SQLite gives the
    files it puts beside a database the database's own mode. One that is there already keeps its mode."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _with_driver(url: sa.URL) -> sa.URL:
    """PostgreSQL is spoken to through psycopg unless the URL names another driver."""
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _reason(error: Exception) -> str:
    """In one line."""
    if isinstance(error, ImportError) and error.name == "psycopg":
        return "PostgreSQL needs the driver psycopg; install it with: pip install 'heddle-serve[postgresql]'"
    return str(error.orig if isinstance(error, DBAPIError) else error).partition("\n")[0]


def _unavailable(error: OperationalError) -> StoreError:
    return StoreError("overloaded", f"the registry's database cannot be used now: {_reason(error)}")


def _prepare_sqlite(connection: Any, _record: object) -> None:
    """Transactions begin where we say, are durable when committed, and keep references whole."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    """A writer takes the write lock first: one that reads before it writes could not be let in later."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _collided(error: DBAPIError) -> bool:
    """Whether trying again can help: a row that another transaction inserted first, a lock, a deadlock."""
    if isinstance(error, IntegrityError):
        return True
    code = getattr(error.orig, "sqlstate", None)
    return code in ("40001", "40P01") or "locked" in str(error.orig) or "busy" in str(error.orig)
