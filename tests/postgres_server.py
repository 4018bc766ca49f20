"""A PostgreSQL server of the tests' own: made, started, and stopped by its process number."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import sqlalchemy as sa

START_SECONDS = 60


class PostgresServer:
    """One server in a temporary folder, to be reached through a socket in it; `new_database` as often as
    wanted.

    It refuses to run as root, so root starts it as the package's user. Raises LookupError, with a message,
    where it is not installed.
    """

    def __init__(self) -> None:
        programs = _programs()
        self._user = _unprivileged() if os.geteuid() == 0 else None
        # Not below pytest's folder, which other users cannot enter. Short: a socket's path has 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="heddle-pg-"))
        try:
            if self._user is not None:
                shutil.chown(self._folder, self._user)
            data = self._folder / "data"
            made = self._start(
                programs / "initdb", "--auth=trust", "--username=heddle", "--encoding=UTF8", "--no-sync", data
            )
            output, _ = made.communicate()
            if made.returncode:
                raise RuntimeError(f"initdb failed: {output}")
            self._process = self._start(
                programs / "postgres", "-D", data, "-k", self._folder,
                "-c", "listen_addresses=", "-c", "max_connections=200",
                "-c", "fsync=off",  # nobody cuts its power, and what it wrote is thrown away
                log=(self._folder / "log").open("w"),
            )  # fmt: skip
            self._admin = sa.create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
            self._wait()
        except BaseException:
            shutil.rmtree(self._folder)
            raise

    def new_database(self) -> str:
        """The SQLAlchemy URL of an empty database."""
        name = f"test_{uuid.uuid4().hex}"
        with self._admin.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        return self._url(name)

    def close(self) -> None:
        """Stop the server, whoever is connected, and remove all it wrote."""
        self._admin.dispose()
        self._process.send_signal(signal.SIGQUIT)  # to PostgreSQL: end now, and write nothing more
        try:
            self._process.wait(30)
        finally:
            shutil.rmtree(self._folder)

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://heddle@/{database}?host={self._folder}"

    def _start(self, *command: object, log: object = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(part) for part in command],
            stdout=log,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            text=True,
            user=self._user,
            cwd=self._folder,
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._admin.connect().close()
                return
            except sa.exc.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self._folder / "log").read_text()
                    raise RuntimeError(f"the PostgreSQL server does not answer: {log}") from error
                time.sleep(0.05)


def _programs() -> Path:
    """The newest version's folder: Debian keeps them off the search path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if found:
        return found[-1].parent
    if (program := shutil.which("initdb")) is not None:
        return Path(program).resolve().parent
    raise LookupError("no PostgreSQL server is installed (Debian's package `postgresql`)")


def _unprivileged() -> str:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise LookupError("there is no unprivileged user to run a PostgreSQL server as")
