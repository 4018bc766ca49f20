"""Adapters, tenants and keys as tables, and sizes and times as people read them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Adapter = Mapping[str, Any]
"""The HTTP interface's adapter object."""


def size(count: int) -> str:
    """Bytes in binary units: 460800 -> "450.0 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def ago(time: str | None, now: datetime | None = None) -> str:
    """An RFC 3339 time as its distance from now: "5 s ago"; "never" for null."""
    if time is None:
        return "never"
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(time)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def adapter_table(adapters: Iterable[Adapter]) -> Table:
    """What `heddle adapters list` shows."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("name", "tenant", "version"):
        table.add_column(column, overflow="fold")
    table.add_column("rank", justify="right")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("residency")
    table.add_column("pinned")
    table.add_column("in use", justify="right")
    table.add_column("last used", no_wrap=True)
    for adapter in adapters:
        table.add_row(
            adapter["name"],
            adapter["tenant"],
            str(adapter["version"]),
            str(adapter["rank"]),
            size(adapter["size_bytes"]),
            state(adapter),
            "yes" if adapter["pinned"] else "no",
            str(adapter["in_use"]),
            ago(adapter["last_used_at"]),
        )
    return table


def state(adapter: Adapter) -> str:
    """Where the adapter is; or what is wrong with it, which is more to the point."""
    return (
        adapter["residency"]
        if adapter["status"] == "ready"
        else f"{adapter['residency']} ({adapter['status']})"
    )


def tenant_table(tenants: Iterable[Mapping[str, Any]]) -> Table:
    """What `heddle tenants list` shows."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name", overflow="fold")
    table.add_column("weight", justify="right")
    table.add_column("limits", overflow="fold")
    table.add_column("created", no_wrap=True)
    for tenant in tenants:
        table.add_row(
            tenant["name"], f"{tenant['weight']:g}", limits(tenant["limits"]), ago(tenant["created_at"])
        )
    return table


def key_table(keys: Iterable[Mapping[str, Any]]) -> Table:
    """What `heddle keys list` shows."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("id", "tenant", "begins with"):
        table.add_column(column, no_wrap=True)
    table.add_column("description", overflow="fold")
    for column in ("created", "last used", "expires", "state"):
        table.add_column(column, no_wrap=True)
    for key in keys:
        table.add_row(
            key["id"],
            key["tenant"],
            key["prefix"],
            key["description"] or "-",
            ago(key["created_at"]),
            ago(key["last_used_at"]),
            key["expires_at"] or "never",
            key_state(key),
        )
    return table


def key_state(key: Mapping[str, Any], now: datetime | None = None) -> str:
    """Whether it opens anything."""
    if key["revoked_at"] is not None:
        return "revoked"
    end = key["expires_at"]
    return "expired" if end and datetime.fromisoformat(end) <= (now or datetime.now(UTC)) else "valid"


def limits(values: Mapping[str, Any]) -> str:
    """Those that are set: "max_rank=16, pool_share=0.5"."""
    return (
        ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items()
            if value is not None
        )
        or "none"
    )


def details(fields: Mapping[str, Any]) -> Table:
    """Everything about one thing, a line a field."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for field, value in fields.items():
        table.add_row(field.replace("_", " "), _plain(field, value))
    return table


def _plain(field: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field == "size_bytes":
        return f"{size(value)} ({value})"
    if field == "limits":
        return limits(value)
    if field == "matched":
        return f"{value['tensors']} of {value['total']} tensors"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def show(table: Table) -> None:
    """Print to stdout: fitted to a terminal, unwrapped where the output goes to a file or another program."""
    width = None if sys.stdout.isatty() else 10_000
    Console(width=width, highlight=False, markup=False).print(table)
