"""Logging of all processes: one line an event on standard error, JSON unless a terminal reads along.

Control code: no torch.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
NOISY = (
    "uvicorn",
    "httpx",
    "huggingface_hub",
    "sqlalchemy",
    "alembic",
    "opentelemetry",
    "numba",
    "triton",
    "torch",
)
"""Libraries whose news is not this program's: warnings of theirs at most."""


class JsonLines:
    """Writes many events at once, each as structlog does it here one by one, whose way there costs a busy server more
    than all else about a line."""

    def __init__(self, threshold: int, always: Mapping[str, Any]) -> None:
        self._threshold = threshold
        self._always = always
        self._write = structlog.WriteLogger(sys.stderr).msg

    def writes(self, level: str) -> bool:
        """Whether events of this level are written at all."""
        return LEVELS[level] >= self._threshold

    def write(self, events: Iterable[tuple[str, EventDict]]) -> None:
        """Each with its level, one that is written, and with all that is known of it: nobody is asked for its
        context."""
        lines, stamp = [], _now()
        for level, event in events:
            event["level"], event["timestamp"] = level, stamp
            lines.append(_as_json(None, level, {**self._always, **event} if self._always else event))
        if lines:
            self._write("\n".join(lines))


def configure(level: str, context: Callable[[], Mapping[str, Any]] = dict, **always: Any) -> JsonLines | None:
    """Set up structlog and the standard library's loggers; called once, by a process's start.

    `context`: what is known of the work that a line is about, at the moment it is logged. `always`: fields of every
    line. Returns what writes many lines at once, unless a terminal reads along.
    """
    threshold = LEVELS[level.lower()]

    def add_context(_logger: object, _method: str, event: EventDict) -> EventDict:
        return {**event, **context()}

    def stamp(_logger: object, _method: str, event: EventDict) -> EventDict:
        event["timestamp"] = _now()
        return {**always, **event} if always else event

    shared: list[structlog.typing.Processor] = [
        add_context,
        structlog.stdlib.add_log_level,
        stamp,
    ]
    renderer: structlog.typing.Processor = _as_json
    if sys.stderr.isatty():
        # Plain, because the other formatter shows the values of variables: prompts and keys are among them.
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_drop_meta, renderer])
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(threshold)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(max(threshold, logging.WARNING))
    return JsonLines(threshold, always) if renderer is _as_json else None


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _as_json(logger: object, method: str, event: EventDict) -> str:
    """The line, in ASCII alone, so that no control character or line break of any reader's is in it."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    try:
        line = _encode(event)
    except (OverflowError, TypeError, UnicodeEncodeError):  # what msgspec has no form for
        return _encode_anything(event)
    return line.decode() if line.isascii() else _encode_anything(event)


_encode = msgspec.json.Encoder(enc_hook=repr).encode
_encode_anything = json.JSONEncoder(default=repr, skipkeys=True).encode
_drop_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
