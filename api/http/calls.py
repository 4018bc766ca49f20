"""What becomes known of one HTTP call while it is answered: for the log, the metrics and the trace of it."""

from __future__ import annotations

import time
from contextvars import ContextVar

import msgspec

Label = str | list[str] | None
"""An adapter as answers name it; several; None: the base alone."""


class Generated(msgspec.Struct):
    """What a completion or chat asked for and used. Of the texts themselves nothing is here."""

    operation: str
    """`chat` or `text_completion`, OpenTelemetry's names."""
    model: str
    """As the request and its answer name it; one that exists."""
    adapter: Label
    answer_id: str
    streams: bool
    sequences: int
    max_tokens: int | None
    temperature: float
    top_p: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_token_after: float | None = None
    """Seconds from the call's arrival; None: there was none."""
    finish_reasons: list[str] = []
    """Of the sequences that came to their end."""


class Call(msgspec.Struct):
    """One call. The front door makes it; whoever learns something about it writes it down here."""

    request_id: str
    method: str
    path: str
    """As it came, percent signs and all: it can hold no line breaks."""
    traceparent: str | None = None
    tracestate: str | None = None
    began: float = msgspec.field(default_factory=time.monotonic)
    began_at: int = msgspec.field(default_factory=time.time_ns)
    """Nanoseconds since 1970."""
    tenant: str | None = None
    status: int = 0
    code: str | None = None
    """Of the error it ended with, also in the middle of a stream."""
    left: bool = False
    """It was cut before its end: the client left, or its time was over."""
    generated: Generated | None = None
    ended: float | None = None

    def end(self) -> None:
        """Its answer is sent."""
        self.ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """From its arrival to its end, or until now."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def begin(call: Call) -> None:
    """From here on this task, and those it starts, work on `call`."""
    _current.set(call)


def current() -> Call | None:
    """The call this task works on; None outside of any."""
    return _current.get()
