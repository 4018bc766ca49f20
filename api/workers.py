"""The threads that keep the event loop free: one small pool for each kind of work."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """A named pool of threads, awaited from the event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a thread, in this task's context. A cancelled caller leaves it running to its
        end.
        """
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class Workers:
    """Apart from each other, so that a long validation delays no request's tokenising and no registry
    look-up.
    """

    def __init__(self) -> None:
        self.text = Pool("text", 2)
        """Tokenising and chat templates."""
        self.grammars = Pool("grammars", 2)
        """Checking what is to guide answers."""
        self.registry = Pool("registry", 1)
        """Questions to the registry. One at a time: they are computed more than waited for, and threads that compute
        have the interpreter in turns with the event loop, so that every one more makes its work take longer."""
        self.changes = Pool("changes", 1)
        """Changes of the registry, which wait for its lock and for the disk, and nobody's question with them."""
        self.files = Pool("files", 2)
        """Uploads, copies, validation of adapters."""
        self.downloads = Pool("downloads", 4)
        """What waits for others' servers, maybe for minutes."""

    def close(self) -> None:
        for pool in (self.text, self.grammars, self.registry, self.changes, self.files, self.downloads):
            pool.close()
