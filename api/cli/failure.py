"""How a command ends that cannot do what was asked: a plain line on stderr and the right exit status."""

from __future__ import annotations

from typing import NoReturn

import rich_click as click
from click.exceptions import Exit

REFUSED = 1
"""A request was understood and refused, or could not be carried out."""
USAGE = 2
"""The command line itself is wrong, or asks for what this machine or version cannot do."""


def fail(message: str, status: int) -> NoReturn:
    """Print the reason, unwrapped (scripts read it), and end the command with `status`."""
    click.echo(f"heddle: {message}", err=True)
    raise Exit(status)


def note(message: str) -> None:
    """Tell the user something on stderr and go on."""
    click.echo(f"note: {message}", err=True)
