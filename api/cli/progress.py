"""Progress bars on stderr for everything that takes a while before a model serves."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .render import size

LINE_SECONDS = 20.0
"""Where stderr is no terminal: so long between two lines on one thing that is going on."""


class ProgressBars:
    """One bar for each thing that is going on, shown by name; plain lines where stderr is no terminal.

    A context manager, and the callback (what, done, total) of downloads, conversions and loading. A total of
    0 means that nobody knows it.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._tasks: dict[str, TaskID] = {}
        self._said = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # printed above the bars; piped output stays on stdout
        )

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bars as they stand; nothing moves any more."""
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        amount, now = _amount(done, total), time.monotonic()
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total or None, amount="")
            self._say(f"{what} …", now)
        elif now - self._said >= LINE_SECONDS:
            self._say(f"{what}: {amount}", now)
        self._progress.update(self._tasks[what], completed=done, total=total or None, amount=amount)

    def _say(self, line: str, now: float) -> None:
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)
            self._said = now


def _amount(done: int, total: int) -> str:
    """Bytes as sizes; small totals count things."""
    if total == 0:
        return ""
    return f"{size(done)} of {size(total)}" if total > 1_000_000 else f"{done} of {total}"
