"""The sequences of one request on the engine: submitted together, listened to together, aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from ..core.client import EngineClient
from ..core.messages import SequenceOutput
from .choices import Choice, Delta
from .protocol.generation import Usage

Item = tuple[Choice, SequenceOutput | Exception | None]
"""An output of a choice's sequence, what went wrong with it, or None for its end."""


class Run:
    """`choices` in the order of their indexes: all of the first prompt, all of the second, …"""

    def __init__(self, engine: EngineClient, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self._engine = engine

    async def deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """What each step brings, as it comes, until every choice is finished.

        Raises `EngineFailure`, and then the others are aborted; so they are when the generator is closed
        early. When it ends, however it does, the engine has been told to free everything.
        """
        inbox: asyncio.Queue[Item] = asyncio.Queue()
        listeners = {choice: asyncio.create_task(self._listen(choice, inbox)) for choice in self.choices}
        try:
            left = len(listeners)
            while left:
                choice, item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                elif not choice.finished:
                    delta = choice.take(item)
                    if choice.finished and item.finish_reason is None:
                        listeners[choice].cancel()  # a stop string: closes the engine's stream, which aborts
                    yield choice, delta
                    if not inbox.empty():
                        await asyncio.sleep(0)  # a backlog must not keep other requests waiting
        finally:
            for listener in listeners.values():
                listener.cancel()
            await asyncio.gather(*listeners.values(), return_exceptions=True)

    async def _listen(self, choice: Choice, inbox: asyncio.Queue[Item]) -> None:
        try:
            # Cancelling this task closes the stream: it waits nowhere but in there.
            async for output in self._engine.generate(choice.command):
                inbox.put_nowait((choice, output))
        except Exception as error:  # noqa: BLE001 - handed to the one who waits for it, which raises it
            inbox.put_nowait((choice, error))
        finally:
            inbox.put_nowait((choice, None))

    def usage(self) -> Usage:
        """So far. A prompt with several answers counts once, with what its first one found in the cache."""
        prompts = {id(choice.prompt): choice for choice in reversed(self.choices)}
        return Usage.of(
            prompt_tokens=sum(len(choice.prompt.token_ids) for choice in prompts.values()),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in prompts.values()),
        )
