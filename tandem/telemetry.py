"""Logs. Called by composition roots only; libraries just ask structlog for a logger and log events with fields.

No prompt, no generated text, no key is ever a field.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def configure_logging(*, service: str, level: str, format: Literal["text", "json"]) -> None:
    """One line per event on standard error, with time, level, service and the request id where one is bound."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _named(service),
    ]
    if format == "json":
        rendering: list[structlog.types.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        rendering = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=28,
                exception_formatter=structlog.dev.plain_traceback,  # the default shows local variables: prompts
            )
        ]
    number = logging.getLevelNamesMapping()[level]
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard library: the same line format, warnings and above.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_drop_record, *rendering])
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))


def _named(service: str) -> structlog.types.Processor:
    def add(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        event["service"] = service
        return event

    return add


def _drop_record(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    event.pop("_record", None)
    event.pop("_from_structlog", None)
    return event
