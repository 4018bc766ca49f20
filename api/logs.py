"""Logging: one line an event on standard error, with the id of the request it belongs to."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def configure(level: str) -> None:
    """Set up structlog and the standard library's loggers; called once, by the server's start."""
    threshold = LEVELS[level.lower()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    if sys.stderr.isatty():
        renderer = structlog.dev.ConsoleRenderer()
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
    for noisy in ("uvicorn", "httpx", "huggingface_hub", "sqlalchemy", "alembic"):
        logging.getLogger(noisy).setLevel(max(threshold, logging.WARNING))


_drop_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
