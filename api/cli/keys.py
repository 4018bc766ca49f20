"""`heddle keys …`: the admin commands for tenants' keys, spoken to a running server."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import rich_click as click

from .admin import Server, command_of, print_json

UNITS = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days"}


class Moment(click.ParamType):
    """A time, RFC 3339, or a span from now."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        try:
            if (span := re.fullmatch(r"(\d{1,9})(s|min|h|d)", text)) is not None:
                moment = datetime.now(UTC) + timedelta(**{UNITS[span[2]]: int(span[1])})
            else:
                moment = datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is neither a time nor a span such as 90min, 12h or 30d", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{text!r} has no offset from UTC: end it with Z, or +02:00", param, ctx)
        return moment.isoformat()


@click.group()
def keys() -> None:
    """Make, list and revoke the keys of a tenant, which --tenant names."""


_command = command_of(keys)


@_command
@click.option("--description", help="A line about it.")
@click.option(
    "--expires",
    "expires_at",
    type=Moment(),
    metavar="TIME",
    help="A time such as 2030-01-31T12:00:00Z, or a span from now: 90min, 12h, 30d. [default: never]",
)
def create(server: Server, as_json: bool, **fields: str | None) -> None:
    """Make a key and print it: nothing will show it again.

    The key alone goes to stdout, so that a script can take it from there.
    """
    path = server.keys_path()
    given = {name: value for name, value in fields.items() if value is not None}
    answer: dict[str, Any] = server.call("POST", path, json=given)
    if as_json:
        print_json(answer)
        return
    click.echo(answer["key"])
    until = answer["expires_at"] or "it is revoked"
    click.echo(
        f"{answer['id']} for tenant {answer['tenant']}, good until {until}; keep it, it is not shown again",
        err=True,
    )


@_command
def list_(server: Server, as_json: bool) -> None:
    """List the keys, the revoked ones too, without what opens anything."""
    from .render import key_table, show

    answer = server.call("GET", server.keys_path())
    if as_json:
        print_json(answer)
    else:
        show(key_table(answer["data"]))


@_command
@click.argument("key_id", metavar="ID")
def revoke(server: Server, as_json: bool, key_id: str) -> None:
    """Revoke the key ID: it opens nothing any more."""
    server.call("DELETE", server.keys_path(key_id))
    if as_json:
        print_json({"revoked": key_id})
    else:
        click.echo(f"revoked {key_id}")
