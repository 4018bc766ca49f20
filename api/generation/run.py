"""The sequences of one request on the engine: submitted together, listened to together, aborted together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from ...core.client import EngineClient
from ...core.messages import SequenceOutput
from ...core.sequence_outputs import SequenceOutputs, merged
from .. import turns
from ..protocol.generation import Usage
from .choices import Choice, Delta

BACKLOG = 8
"""Outputs of a choice that wait at a time before they are taken together: a server that had no time to send every
token by itself does not make up for it either."""
SUBMITTED_AT_ONCE = 64
"""Sequences: with each goes its prompt, which may be as long as the model's context."""


class Run:
    """`choices` in the order of their indexes: all of the first prompt, all of the second, …

    A context: whoever leaves it, the engine has been told to free everything.
    """

    def __init__(self, engine: EngineClient, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self._engine = engine
        self._by_key = {choice.command.key: choice for choice in choices}
        self._left = len(choices)
        self._outputs: SequenceOutputs | None = None
        self._taken: deque[SequenceOutput] = deque()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._outputs is not None:
            self._outputs.close()

    async def submit(self) -> None:
        """Raises `EngineFailure`."""
        commands = [choice.command for choice in self.choices]
        outputs = self._outputs = self._engine.submit(commands[:SUBMITTED_AT_ONCE])
        for begin in range(SUBMITTED_AT_ONCE, len(commands), SUBMITTED_AT_ONCE):
            await turns.enter()
            self._engine.submit(commands[begin : begin + SUBMITTED_AT_ONCE], outputs)

    @property
    def running(self) -> bool:
        """Not every choice is finished."""
        return self._left > 0

    async def step(self) -> Iterator[tuple[Choice, Delta]]:
        """What has come, or comes next; of very much a part, so that others have their turn.

        A choice stands at a delta when that is reached, which raises `EngineFailure` where the sequence failed.
        """
        assert self._outputs is not None, "submit comes first"
        if self._taken:
            await turns.enter()
        else:
            taken = await self._outputs.take()
            self._taken.extend(taken if len(taken) <= BACKLOG * self._left else merged(taken))
        return self._deltas(self._outputs)

    def _deltas(self, outputs: SequenceOutputs) -> Iterator[tuple[Choice, Delta]]:
        ends = time.monotonic() + turns.TURN_SECONDS
        while self._taken:
            output = self._taken.popleft()
            choice = self._by_key[output.key]
            if choice.finished:
                continue
            delta = choice.take(output)
            if choice.finished:
                self._left -= 1
                outputs.abort(output.key)  # where a stop string ended it, the engine does not know
            yield choice, delta
            if self._taken and time.monotonic() > ends:
                return

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
