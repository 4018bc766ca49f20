"""`heddle tenants …`: the admin commands for tenants, spoken to a running server."""

from __future__ import annotations

from typing import Any

import rich_click as click

from ...core import byte_size
from ..tenants.records import Limits
from .admin import Server, command_of, print_details, print_json
from .values import FiniteRange

Given = tuple[str, int | float | None]
"""A limit's name and its value; None lifts it."""


class Limit(click.ParamType):
    """One limit as NAME=VALUE or NAME=none."""

    name = "name=value"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Given:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if name not in Limits.__struct_fields__ or not equals:
            known = ", ".join(Limits.__struct_fields__)
            self.fail(f"{value!r} does not set a limit: give NAME=VALUE, NAME one of {known}", param, ctx)
        try:
            if text == "none":
                return name, None
            if name == "adapter_bytes":
                return name, byte_size.parse(text)
            return name, float(text) if name == "pool_share" else int(text)
        except ValueError:
            self.fail(f"{value!r}: {text!r} is no number, and not none", param, ctx)


@click.group()
def tenants() -> None:
    """List, make, change and remove the tenants of a running server."""


_command = command_of(tenants, in_tenant=False)

_weight = click.option(
    "--weight",
    type=FiniteRange(min=0, min_open=True),
    help="Its share of the engine's time, relative to a tenant of weight 1.",
)
_limits = click.option(
    "--limit",
    "limits",
    type=Limit(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Such as requests_per_minute=60, adapter_bytes=2GiB, pool_share=0.5; NAME=none lifts it. Repeatable.",
)


def _body(weight: float | None, limits: tuple[Given, ...]) -> dict[str, Any]:
    body: dict[str, Any] = {} if weight is None else {"weight": weight}
    return body | {"limits": dict(limits)} if limits else body


def _print_tenant(answer: dict[str, Any], as_json: bool, done: str) -> None:
    from .render import limits

    if as_json:
        print_json(answer)
    else:
        click.echo(f"{done} {answer['name']}: weight {answer['weight']:g}, limits {limits(answer['limits'])}")


@_command
def list_(server: Server, as_json: bool) -> None:
    """List the tenants."""
    from .render import show, tenant_table

    answer = server.call("GET", server.tenant_path())
    if as_json:
        print_json(answer)
    else:
        show(tenant_table(answer["data"]))


@_command
@click.argument("name")
@_weight
@_limits
def create(
    server: Server,
    as_json: bool,
    name: str,
    weight: float | None,
    limits: tuple[Given, ...],
) -> None:
    """Make the tenant NAME."""
    answer = server.call("POST", server.tenant_path(), json={"name": name} | _body(weight, limits))
    _print_tenant(answer, as_json, "created")


@_command
@click.argument("name")
def show(server: Server, as_json: bool, name: str) -> None:
    """Show one tenant: its weight and its limits."""
    print_details(server.call("GET", server.tenant_path(name)), as_json)


@_command
@click.argument("name")
@_weight
@_limits
def update(
    server: Server,
    as_json: bool,
    name: str,
    weight: float | None,
    limits: tuple[Given, ...],
) -> None:
    """Change the weight or limits of NAME; what is not named stays."""
    answer = server.call("PATCH", server.tenant_path(name), json=_body(weight, limits))
    _print_tenant(answer, as_json, "changed")


@_command
@click.argument("name")
def remove(server: Server, as_json: bool, name: str) -> None:
    """Remove NAME with its keys, adapters and usage."""
    server.call("DELETE", server.tenant_path(name))
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"removed {name}")
