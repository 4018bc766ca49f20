"""The settings of one server: what the flags of `heddle serve` become."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Literal

import msgspec

from ..core.config import EngineConfig
from .tenants.auth import PUBLIC, is_loopback

MIB = 2**20
OWN_FILES = 256
"""Of the files a process may have open, so many are not left to connections."""


def default_data_dir() -> Path:
    """Where the registry and the adapters of a server are kept unless it is told otherwise."""
    return Path.home() / ".local" / "share" / "heddle"


def open_files() -> int:
    """How many this process may have open: what `ulimit -n` says."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one server listens, what it serves and what it allows."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    served_model_name: str | None = None
    """The base's name in requests. None: the name of its folder."""
    adapters: tuple[tuple[str, str], ...] = ()
    """(name, source) of adapters registered at the start; a source may be any local folder, or `hf:org/name`.
    """
    shipped_adapters: tuple[tuple[str, str], ...] = ()
    """As `adapters`, where their name has no version for this base yet: what users made of a name stays."""
    tenant: str = PUBLIC
    """Whose they are."""
    adapter_roots: tuple[Path, ...] = (Path("adapters"),)
    """Local sources of a registration over HTTP must lie below one of these."""
    max_adapter_bytes: int = 2048 * MIB
    max_body_bytes: int = 8 * MIB
    """Of every body that is not an adapter."""
    request_timeout: float | None = None
    """Seconds from a request's arrival to the end of its answer."""
    limit_concurrency: int | None = None
    """Connections served at a time. None: as many as the files this process may have open leave room for."""
    data_dir: Path = msgspec.field(default_factory=default_data_dir)
    database: str | None = None
    """SQLAlchemy URL of the registry. None: SQLite in `data_dir`."""
    blob_store: str | None = None
    """fsspec URL of the adapters' files. None: a folder in `data_dir`."""
    admin_key: str | None = None
    allow_anonymous: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"

    @property
    def base_name(self) -> str:
        return self.served_model_name or Path(self.engine.model).name

    @property
    def engine_settings(self) -> EngineConfig:
        """What the engine process is started with: it logs as the server does."""
        return msgspec.structs.replace(self.engine, log_level=self.log_level)

    @property
    def most_connections(self) -> int:
        return self.limit_concurrency or _connections_within(open_files())

    def problem(self) -> str | None:
        """Why a server must not start like this; None where it may."""
        if not is_loopback(self.host) and self.admin_key is None and not self.allow_anonymous:
            return (
                f"--host {self.host} is reachable from other machines and no key is set: give "
                "--admin-key KEY, or --allow-anonymous to let everyone register and delete adapters"
            )
        if self.admin_key is not None and not self.admin_key.strip():
            return "--admin-key must not be empty"
        if not self.base_name:
            return "--served-model-name must not be empty"
        files = open_files()
        if self.most_connections > _connections_within(files):
            return (
                f"--limit-concurrency {self.limit_concurrency}: this process may have {files} files open (ulimit -n), "
                f"which leaves {_connections_within(files)} for connections"
            )
        return None


def _connections_within(files: int) -> int:
    return max(files - OWN_FILES, files // 4)
