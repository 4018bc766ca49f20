"""Logging of all processes: one line an event on standard error, JSON unless a terminal reads along.

Control code: no torch.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

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


def configure(level: str, **always: Any) -> None:
    """Set up structlog and the standard library's loggers; called once, by a process's start.

    `always`: fields of every line.
    """
    threshold = LEVELS[level.lower()]

    def add_always(
        _logger: object, _name: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**always, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_always,
    ]
    renderer: structlog.typing.Processor
    if sys.stderr.isatty():
        # Plain, because the other formatter shows the values of variables: prompts and keys are among them.
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        renderer = structlog.processors.JSONRenderer()
        shared.append(structlog.processors.format_exc_info)
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


_drop_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
