"""The outputs of sequences that were submitted together, as the engine sends them. Control code: no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from .messages import SequenceOutput


def merged(outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
    """The same with one output a sequence, as if the engine had made a larger step; an error stays by itself."""
    result: dict[tuple[int, bool], SequenceOutput] = {}
    for output in outputs:
        place = output.key, output.error is not None
        before = result.get(place)
        if before is None:
            result[place] = output
            continue
        result[place] = SequenceOutput(
            key=output.key,
            token_ids=before.token_ids + output.token_ids,
            logprobs=None if output.logprobs is None else (before.logprobs or []) + output.logprobs,
            prompt_logprobs=before.prompt_logprobs,
            cached_tokens=before.cached_tokens,
            finish_reason=output.finish_reason,
            stop_token_id=output.stop_token_id,
        )
    return list(result.values())


class SequenceOutputs:
    """Belongs to one event loop; one task reads it. `close` it, which aborts what has not ended."""

    def __init__(self, keys: Iterable[int], abort: Callable[[Iterable[int]], None]) -> None:
        self._running = set(keys)
        self._abort = abort
        self._ready: list[SequenceOutput] = []
        self._read = False
        self._waiter: asyncio.Future[None] | None = None

    def add(self, keys: Iterable[int]) -> None:
        """More sequences, submitted later."""
        self._running.update(keys)

    def put(self, output: SequenceOutput) -> None:
        if output.finish_reason is not None:
            self._running.discard(output.key)
        self._ready.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[SequenceOutput]:
        """All that has come since the last time, in its order; waits where that is nothing. The last output of a
        sequence has a `finish_reason`; after the last of all there is nothing to wait for."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        self._read = True
        return ready

    @property
    def begun(self) -> bool:
        """Something has come of one of them."""
        return self._read or bool(self._ready)

    def abort(self, key: int) -> None:
        """No more of this one is wanted."""
        if key in self._running:
            self._running.discard(key)
            self._abort([key])

    def close(self) -> None:
        running, self._running = self._running, set()
        if running:
            self._abort(running)
