"""Tracing by OpenTelemetry. Imported by `start_tracing` alone, and only where traces are on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem import __version__
from tandem.tracing import Attributes

_EXPORT_SECONDS = 5.0


class OtelTracing:
    """Tracing into `processor`."""

    def __init__(self, service: str, processor: SpanProcessor, *, sample_ratio: float) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": f"tandem-{service}", "service.version": __version__}),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            shutdown_on_exit=False,  # `close` does it
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tandem", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, *, parent: Mapping[str, str], attributes: Attributes) -> Iterator[None]:
        # An empty context, not the current one: what is current here may belong to another request.
        context = self._propagator.extract(dict(parent), context=Context())
        # No exception is recorded: its text could quote a prompt.
        with self._tracer.start_as_current_span(
            name,
            context=context,
            kind=trace.SpanKind.SERVER,
            attributes=dict(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ):
            yield

    def past(self, name: str, *, seconds: float, attributes: Attributes) -> None:
        now = time.time_ns()
        span = self._tracer.start_span(name, start_time=now - round(seconds * 1e9), attributes=dict(attributes))
        span.end(now)

    def annotate(self, attributes: Attributes) -> None:
        trace.get_current_span().set_attributes(dict(attributes))

    def carrier(self) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def close(self) -> None:
        self._provider.shutdown()


def start_otel(service: str, traces_url: str, *, sample_ratio: float) -> OtelTracing:
    """Spans go to an OTLP receiver over HTTP, in batches, from a thread of their own; too many at once are dropped."""
    exporter = OTLPSpanExporter(endpoint=traces_url, timeout=_EXPORT_SECONDS)
    return OtelTracing(service, BatchSpanProcessor(exporter), sample_ratio=sample_ratio)
