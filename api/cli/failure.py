"""How a command ends that cannot do what was asked: a plain line on stderr and the right exit status.

2 is for the command line alone, by what click tells of it, or by flags that contradict each other: nothing was begun.
Whatever goes wrong once the command has begun is 1. So a path that a flag wants, and that is not there, is 2, and what
may lie elsewhere too (MODEL, SOURCE) is 1 where it is found nowhere.
"""

from __future__ import annotations

from typing import NoReturn

import rich_click as click
from click.exceptions import Exit

REFUSED = 1
"""It was understood, and was refused or could not be carried out."""
USAGE = 2
"""The command line itself is wrong."""


def fail(message: str, status: int) -> NoReturn:
    """Print the reason, unwrapped (scripts read it), and end the command with `status`."""
    click.echo(f"heddle: {message}", err=True)
    raise Exit(status)


def note(message: str) -> None:
    """Tell the user something on stderr and go on."""
    click.echo(f"note: {message}", err=True)
