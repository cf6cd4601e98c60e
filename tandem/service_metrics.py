"""What a model service tells Prometheus. One registry per process, made by its composition root.

Useful with them (PromQL):

* share of time in the model: rate(tandem_model_step_seconds_sum[1m])
* tokens per forward: rate(tandem_model_step_tokens_sum[1m]) / rate(tandem_model_step_tokens_count[1m])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from tandem import __version__
from tandem.scrapes import serve_metrics
from tandem.types import ModelInfo

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class ServiceMetrics:
    """Metrics of the target or a draft service; also the worker's StepObserver."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # `_created` series are summed into counters by prefix readers
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU seconds and memory of this process
        self.sessions = Gauge("tandem_sessions_open", "Sessions (streams) open now", registry=self.registry)
        self.sessions_total = Counter("tandem_sessions", "Sessions opened since the start", registry=self.registry)
        self.rounds_total = Counter("tandem_rounds", "Rounds answered (propose or verify)", registry=self.registry)
        self.errors_total = Counter("tandem_session_errors", "Sessions ended by an error", registry=self.registry)
        self._step_seconds = Histogram(
            "tandem_model_step_seconds", "Time of one forward pass", buckets=_SECONDS, registry=self.registry
        )
        self._step_tokens = Histogram(
            "tandem_model_step_tokens", "Packed tokens of one forward pass", buckets=_TOKENS, registry=self.registry
        )
        self._step_sequences = Histogram(
            "tandem_model_step_sequences", "Sequences in one forward pass", buckets=_TOKENS[:9], registry=self.registry
        )

    def step(self, *, seconds: float, num_tokens: int, num_sequences: int) -> None:
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._step_sequences.observe(num_sequences)

    def describe(self, model: ModelInfo | None, *, threads: int, drafters: Sequence[str] = ()) -> None:
        """What runs here, as the labels of `tandem_build_info`. Once, when it is known."""
        labels = {"version": __version__, "threads": str(threads)}
        if drafters:
            labels["drafters"] = ",".join(drafters)
        if model is not None:
            labels |= {
                "model": model.model_id,
                "revision": model.revision,
                "engine": model.engine,
                "device": model.device,
                "dtype": model.dtype,
            }
        Info("tandem_build", "What runs here", registry=self.registry).info(labels)

    def watch_engine(
        self,
        *,
        blocks_held: Callable[[], int],
        blocks: int,
        programs: Callable[[], int],
        cached_sessions: Callable[[], int],
    ) -> None:
        """Gauges read at each scrape from an engine."""
        self._gauge("tandem_kv_blocks_held", "KV cache blocks that sessions hold", blocks_held)
        self._gauge("tandem_kv_blocks", "KV cache blocks in all", lambda: blocks)
        self._gauge("tandem_programs_waiting", "Propose and verify calls running or waiting for the model", programs)
        self._gauge("tandem_engine_sessions", "Sessions that the engine knows", cached_sessions)

    def serve(self, *, host: str, port: int) -> int:
        """Answer scrapes on a thread of its own; returns the port (0 takes a free one). Raises TandemError."""
        return serve_metrics(self.registry, host=host, port=port)

    def _gauge(self, name: str, documentation: str, read: Callable[[], int]) -> None:
        Gauge(name, documentation, registry=self.registry).set_function(lambda: float(read()))
