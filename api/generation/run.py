"""The sequences of one request on the engine: submitted together, listened to together, aborted together."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from ...core.client import EngineClient
from ...core.sequence_outputs import merged
from .. import turns
from ..protocol.generation import Usage
from .choices import Choice, Delta

BACKLOG = 8
"""Outputs of a choice that wait at a time before they are taken together: a server that had no time to send every
token by itself does not make up for it either."""
SUBMITTED_AT_ONCE = 64
"""Sequences: with each goes its prompt, which may be as long as the model's context."""


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
        commands = [choice.command for choice in self.choices]
        outputs = self._engine.submit(commands[:SUBMITTED_AT_ONCE])
        by_key = {choice.command.key: choice for choice in self.choices}
        try:
            for begin in range(SUBMITTED_AT_ONCE, len(commands), SUBMITTED_AT_ONCE):
                await turns.enter()
                self._engine.submit(commands[begin : begin + SUBMITTED_AT_ONCE], outputs)
            left = len(by_key)
            while left:
                taken, began = await outputs.take(), time.monotonic()
                if len(taken) > BACKLOG * left:
                    taken = merged(taken)
                for output in taken:
                    choice = by_key[output.key]
                    if choice.finished:
                        continue
                    delta = choice.take(output)
                    if choice.finished:
                        left -= 1
                        outputs.abort(output.key)  # where a stop string ended it, the engine does not know
                    yield choice, delta
                    if time.monotonic() - began > turns.TURN_SECONDS:
                        await turns.enter()
                        began = time.monotonic()
        finally:
            outputs.close()

    def usage(self) -> Usage:
        """So far. A prompt with several answers counts once, with what its first one found in the cache."""
        prompt_tokens = completion_tokens = cached_tokens = 0
        before = None
        for choice in self.choices:
            completion_tokens += choice.completion_tokens
            if choice.prompt is not before:
                before = choice.prompt
                prompt_tokens += len(before.token_ids)
                cached_tokens += choice.cached_tokens
        return Usage.of(prompt_tokens, completion_tokens, cached_tokens)
