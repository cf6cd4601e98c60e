"""Logs. Called by composition roots only; libraries just ask structlog for a logger and log events with fields.

No prompt, no generated text, no key is ever a field. Nor does one come with an exception: local variables are not
shown, and of exceptions whose messages quote what they choke on (`_QUOTING`) only the type and the place are.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from typing import Literal, TextIO

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
            structlog.processors.ExceptionRenderer(_format_exception),
            structlog.processors.JSONRenderer(),
        ]
    else:
        rendering = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=28,
                exception_formatter=_print_exception,
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


# int("..."), Unicode errors and pydantic's errors are ValueErrors; a KeyError's message is the key.
_QUOTING = (ValueError, LookupError)


def _print_exception(stream: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    stream.write("\n" + _format_exception(exc_info))


def _format_exception(exc_info: structlog.typing.ExcInfo) -> str:
    """The traceback, causes first, without messages that may quote a request."""
    return "".join(_lines(exc_info[1])).rstrip("\n")


def _lines(error: BaseException) -> Iterator[str]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _lines(before)
        yield "\nthen:\n"
    yield "Traceback (most recent call last):\n"
    yield from traceback.format_tb(error.__traceback__)
    message = "(its message is left out: it may quote a request)" if isinstance(error, _QUOTING) else str(error)
    yield f"{type(error).__qualname__}: {message}\n"
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _lines(part)


def _named(service: str) -> structlog.types.Processor:
    def add(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        event["service"] = service
        return event

    return add


def _drop_record(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    event.pop("_record", None)
    event.pop("_from_structlog", None)
    return event
