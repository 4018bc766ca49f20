"""What the whole suite shares: the real demo base, and a real PostgreSQL server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .postgres_server import PostgresServer

os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # read when triton is first imported: its kernels take CPU tensors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="10,000 malformed bodies, and schemathesis for 20 minutes"
    )


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the long form of a test is asked for."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture(scope="session")
def demo_base() -> Path:
    """The demo base's folder, fetched and converted once into the user's cache."""
    from heddle.core.checkpoint.demo import demo_base

    return demo_base()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running server; who asks for it is skipped where the package is not installed."""
    try:
        server = PostgresServer()
    except LookupError as reason:
        pytest.skip(str(reason))
    yield server
    server.close()
