"""`heddle adapters …`: the admin commands for adapters, spoken to a running server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import rich_click as click

from .admin import FILES, Server, command_of, print_details, print_json
from .failure import REFUSED, fail


@click.group()
def adapters() -> None:
    """List, add, move and remove the adapters of a running server."""


_command = command_of(adapters)


def _print_adapters(answer: dict[str, Any], as_json: bool) -> None:
    from .render import adapter_table, show

    if as_json:
        print_json(answer)
    else:
        show(adapter_table(answer["data"]))


def _print_adapter(answer: dict[str, Any], as_json: bool, done: str) -> None:
    if as_json:
        print_json(answer)
    else:
        version = "" if answer["version"] is None else f"@{answer['version']}"
        click.echo(f"{done} {answer['name']}{version}: {answer['residency']}, {answer['blocks']} blocks")
        for warning in answer["warnings"]:
            click.echo(f"warning: {warning}", err=True)


@_command
def list_(server: Server, as_json: bool) -> None:
    """List the adapters."""
    _print_adapters(server.call("GET", server.path()), as_json)


@_command
@click.argument("name")
def versions(server: Server, as_json: bool, name: str) -> None:
    """List every version kept under NAME."""
    _print_adapters(server.call("GET", server.path(name, "versions")), as_json)


@_command
@click.argument("name")
def show(server: Server, as_json: bool, name: str) -> None:
    """Show everything about one adapter."""
    print_details(server.call("GET", server.path(name)), as_json)


@_command
@click.argument("name")
@click.argument("source")
@click.option(
    "--server-path", is_flag=True, help="SOURCE is a folder on the server's machine, below an --adapter-root."
)
@click.option("--replace", is_flag=True, help="Make a new version if NAME already holds other weights.")
@click.option("--pinned", is_flag=True, help="Never evict it under pressure.")
@click.option(
    "--preload/--no-preload", default=None, help="Bring it to the device at once, or at its first request."
)
@click.option("--description", help="A line about it.")
@click.option("--dry-run", is_flag=True, help="Validate and plan; change nothing.")
def add(
    server: Server,
    as_json: bool,
    name: str,
    source: str,
    server_path: bool,
    dry_run: bool,
    **fields: bool | str | None,
) -> None:
    """Register the adapter SOURCE as NAME.

    SOURCE is a PEFT folder on this machine, which is uploaded; or `hf:org/name[@revision]`, which the server
    fetches; or, with --server-path, a folder on the server's machine, which the server reads.
    """
    # What was left alone is not sent; --no-preload is a wish of its own.
    given = {field: value for field, value in fields.items() if value or (field, value) == ("preload", False)}
    if server_path or source.startswith("hf:"):
        answer = server.register(name, source, given, dry_run)
    else:
        answer = server.upload(name, _peft_folder(source), given, dry_run)
    _print_adapter(answer, as_json, "would add" if dry_run else "added")


def _peft_folder(source: str) -> Path:
    folder = Path(os.path.expanduser(source))  # Path's own raises where there is no such user
    if not folder.is_dir():
        fail(f"there is no folder {source} here; one on the server's machine needs --server-path", REFUSED)
    for file in FILES:
        if not (folder / file).is_file():
            fail(f"{source} has no {file}: a PEFT adapter saved as safetensors is needed", REFUSED)
    return folder


@_command
@click.argument("name")
def remove(server: Server, as_json: bool, name: str) -> None:
    """Remove NAME with all its versions, or NAME@VERSION alone."""
    server.call("DELETE", server.path(name))
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"removed {name}")


@_command
@click.argument("name")
def load(server: Server, as_json: bool, name: str) -> None:
    """Bring NAME to the device now."""
    _print_adapter(server.call("POST", server.path(name, "load")), as_json, "loaded")


@_command
@click.argument("name")
@click.option(
    "--to", type=click.Choice(["host", "disk"]), default="host", show_default=True, help="Where it stays."
)
def evict(server: Server, as_json: bool, name: str, to: str) -> None:
    """Take NAME off the device."""
    _print_adapter(server.call("POST", server.path(name, "evict"), json={"to": to}), as_json, "evicted")


@_command
@click.argument("name")
def pin(server: Server, as_json: bool, name: str) -> None:
    """Keep NAME from being evicted under pressure."""
    _print_adapter(server.call("PATCH", server.path(name), json={"pinned": True}), as_json, "pinned")


@_command
@click.argument("name")
def unpin(server: Server, as_json: bool, name: str) -> None:
    """Let NAME be evicted under pressure again."""
    _print_adapter(server.call("PATCH", server.path(name), json={"pinned": False}), as_json, "unpinned")
