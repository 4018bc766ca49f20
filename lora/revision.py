"""The revision of a SQLite registry, read so quickly that every request can ask. Control code: no torch."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

QUESTION = "SELECT revision FROM installation"


class RevisionReader:
    """Reads it on a connection of its own, without waiting for anyone. Thread-safe.

    One question takes microseconds: in WAL mode a reader waits for no writer, and the two pages it looks at
    lie in memory.
    """

    def __init__(self, file: Path) -> None:
        """`file`: a registry that is in WAL mode already."""
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA query_only = ON")

    def read(self) -> int | None:
        """As committed at this moment; None where it is not to be had without waiting."""
        try:
            with self._lock:
                rows = self._connection.execute(QUESTION).fetchall()  # all: ends the read transaction
        except sqlite3.Error:  # locked for recovery, or closed
            return None
        return int(rows[0][0])

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error), self._lock:
            self._connection.close()
