"""Traces, where they are asked for: one span for each request, one below it for each round, one for each session.

Off unless `TANDEM_TRACING_ENDPOINT` names a receiver; OpenTelemetry (extra `tracing`) is imported only then. Spans say
how long things took, how many tokens were drafted and accepted, and which request it was. They hold no text and no key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from tandem.errors import TandemError
from tandem.settings import TracingSettings

Value = str | int | float | bool
Attributes = Mapping[str, Value]


class Tracing(Protocol):
    """What a process tells of where its time goes. Of the spans that are open, the innermost one is the current one."""

    @contextmanager
    def span(self, name: str, *, parent: Mapping[str, str], attributes: Attributes) -> Iterator[None]:
        """A span as long as the block, and the current one in it and in tasks that begin in it.

        `parent`: headers or metadata of who asked, which may name the trace that this belongs to.
        """
        yield

    def past(self, name: str, *, seconds: float, attributes: Attributes) -> None:
        """Below the current span, one that ends now and has lasted so long."""

    def annotate(self, attributes: Attributes) -> None:
        """Say more of the current span."""

    def carrier(self) -> Mapping[str, str]:
        """What to send along, so that the spans of who is called come to lie below the current one."""

    def close(self) -> None:
        """Send what has not been sent; takes seconds at most, whether or not the receiver answers."""


class NoTracing:
    """Tracing that is switched off."""

    @contextmanager
    def span(self, name: str, *, parent: Mapping[str, str], attributes: Attributes) -> Iterator[None]:
        yield

    def past(self, name: str, *, seconds: float, attributes: Attributes) -> None:
        pass

    def annotate(self, attributes: Attributes) -> None:
        pass

    def carrier(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        pass


def start_tracing(service: str, settings: TracingSettings) -> Tracing:
    """As the settings say. Raises TandemError where OpenTelemetry is wanted and missing."""
    if settings.endpoint is None:
        return NoTracing()
    try:
        from tandem.otel import start_otel
    except ImportError as error:
        raise TandemError(
            f"TANDEM_TRACING_ENDPOINT is set, but {error.name} is not installed: pip install 'tandem-serve[tracing]'"
        ) from error
    return start_otel(service, settings.traces_url, sample_ratio=settings.sample_ratio)
