"""What the gateway tells Prometheus. One registry per process, made by its composition root.

Counters rather than ratios; every series exists, at zero, from the start. Useful with them (PromQL):

* acceptance rate: rate(tandem_spec_decode_num_accepted_tokens_total[5m])
  / rate(tandem_spec_decode_num_draft_tokens_total[5m])
* mean acceptance length of rounds with a draft, bonus or recovered token included:
  1 + rate(tandem_spec_decode_num_accepted_tokens_total[5m]) / rate(tandem_spec_decode_num_drafts_total[5m])
* live speed-up over plain decoding on the same target:
  (rate(tandem_plain_step_seconds_sum[5m]) / rate(tandem_plain_step_seconds_count[5m]))
  / (rate(tandem_time_per_output_token_seconds_sum[5m]) / rate(tandem_time_per_output_token_seconds_count[5m]))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    Summary,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from gateway.answer import round_seconds
from gateway.draft_series import SeriesByDraft
from gateway.failover import FailoverReason
from gateway.speculate import Round
from tandem import __version__
from tandem.types import DraftlessReason, Verification

_ROUND_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WAIT_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 17.0)

_DRAFT_FAULTS = (DraftlessReason.DOWN, DraftlessReason.TIMEOUT, DraftlessReason.ERROR)

Outcome = Literal["stop", "length", "cancelled", "error"]


class GatewayMetrics:
    """All of the gateway's series. Every label has a fixed, small set of values."""

    def __init__(self, *, max_num_draft_tokens: int) -> None:
        # Readers that go by prefix add `_created` series to the counters.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU seconds and memory of this process
        Info("tandem_build", "What runs here", registry=self.registry).info({"version": __version__})
        self._positions = max_num_draft_tokens
        self._declare_speculation()
        self._declare_requests()

    def _declare_speculation(self) -> None:
        self._drafts = self._counter(
            "spec_decode_num_drafts",
            "Rounds with a draft. Mean acceptance length, bonus or recovered token included: "
            "1 + rate(tandem_spec_decode_num_accepted_tokens_total[5m]) "
            "/ rate(tandem_spec_decode_num_drafts_total[5m])",
        )
        self._draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Drafted tokens that the target tested; its own tokens do not count"
        )
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens",
            "Drafted tokens that the target accepted; bonus and recovered tokens do not count. Acceptance rate: "
            "rate(tandem_spec_decode_num_accepted_tokens_total[5m]) "
            "/ rate(tandem_spec_decode_num_draft_tokens_total[5m])",
        )
        per_position = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the draft, from 0. Acceptance rate at each position: "
            "rate(tandem_spec_decode_num_accepted_tokens_per_pos_total[5m]) "
            "/ ignoring(position) group_left rate(tandem_spec_decode_num_drafts_total[5m])",
            "position",
        )
        self._accepted_at = [per_position.labels(str(position)) for position in range(self._positions)]
        self._by_draft = SeriesByDraft(self.registry)
        self._wasted = self._counter(
            "wasted_draft_tokens",
            "Drafted tokens that are in no answer: rejected, or accepted past the answer's end. Share: "
            "rate(tandem_wasted_draft_tokens_total[5m]) / rate(tandem_spec_decode_num_draft_tokens_total[5m])",
        )
        self._prepared = self._counter(
            "prepared_hits",
            "Drafts that were ready when they were asked for, made while the target verified the last ones. Share: "
            "rate(tandem_prepared_hits_total[5m]) / rate(tandem_spec_decode_num_drafts_total[5m])",
        )
        self._wire_bytes = self._counter(
            "wire_bytes",
            "Bytes of draft messages, from the draft and on to the target. Per round: "
            "rate(tandem_wire_bytes_total[5m]) / rate(tandem_spec_decode_num_drafts_total[5m])",
        )
        draftless = self._labelled(
            "draftless_rounds",
            "Rounds without a draft, that is, plain decoding, by reason: "
            "sum by (reason) (rate(tandem_draftless_rounds_total[5m]))",
            "reason",
        )
        self._draftless = {reason: draftless.labels(reason.value) for reason in DraftlessReason}
        draft_faults = self._labelled(
            "draft_faults",
            "Sessions that lost their draft, or did not get one, by what they saw: down (its stream broke), timeout, "
            "error. Each is one draftless round or more: sum by (reason) (rate(tandem_draft_faults_total[5m]))",
            "reason",
        )
        self._draft_faults = {reason: draft_faults.labels(reason.value) for reason in _DRAFT_FAULTS}
        round_time = Histogram(
            "tandem_round_seconds",
            "Time of a round by where it is spent: draft and verify inside the services, network all the rest. "
            "Rounds after a request's first, which is its prefill. "
            "sum by (stage) (rate(tandem_round_seconds_sum[5m])) "
            "/ sum by (stage) (rate(tandem_round_seconds_count[5m]))",
            ["stage"],
            buckets=_ROUND_SECONDS,
            registry=self.registry,
        )
        self._stages = [round_time.labels(stage) for stage in ("draft", "verify", "network")]
        self._chosen = self._histogram(
            "draft_tokens_per_round",
            "Drafted tokens (k) of a round, 0 for a draftless one; rounds after a request's first",
            tuple(float(k) for k in range(self._positions + 1)),
        )
        self._acceptance_length = self._histogram(
            "request_acceptance_length",
            "Tokens emitted per target call in one request, bonus or recovered token included. Median: "
            "histogram_quantile(0.5, rate(tandem_request_acceptance_length_bucket[5m]))",
            _LENGTHS,
        )
        self._plain_step = Summary(
            "tandem_plain_step_seconds",
            "Time of a round without a draft, after a request's first: what one token costs in plain decoding. "
            "Live speed-up: (rate(tandem_plain_step_seconds_sum[5m]) / rate(tandem_plain_step_seconds_count[5m])) / "
            "(rate(tandem_time_per_output_token_seconds_sum[5m]) "
            "/ rate(tandem_time_per_output_token_seconds_count[5m]))",
            registry=self.registry,
        )

    def _declare_requests(self) -> None:
        requests = self._labelled(
            "requests", "Answers by how they ended: stop, length, cancelled (the client left), error", "finish_reason"
        )
        self._requests = {outcome: requests.labels(outcome) for outcome in ("stop", "length", "cancelled", "error")}
        rules = self._labelled(
            "verification_answers",
            "Answers begun, by the rule that verifies their drafts: coupled (with a seed) or rejection",
            "verification",
        )
        self._rules = {rule: rules.labels(rule.value) for rule in Verification}
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Tokens of prompts, each counted once however many answers it gets"
        )
        self._generation_tokens = self._counter(
            "generation_tokens",
            "Tokens of answers, as `usage` counts them. Tokens per second: rate(tandem_generation_tokens_total[5m])",
        )
        failovers = self._labelled(
            "failovers",
            "Sessions that were opened again, at another target or the same one, by what they saw: unavailable (the "
            "stream broke), timeout, error, overloaded: sum by (reason) (rate(tandem_failovers_total[5m]))",
            "reason",
        )
        self._failovers = {reason: failovers.labels(reason.value) for reason in FailoverReason}
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to an answer's first token, waiting included. "
            "histogram_quantile(0.95, rate(tandem_time_to_first_token_seconds_bucket[5m]))",
            _WAIT_SECONDS,
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per token of one answer, after its first. "
            "histogram_quantile(0.95, rate(tandem_time_per_output_token_seconds_bucket[5m]))",
            _ROUND_SECONDS,
        )
        self._running = self._gauge("requests_running", "Answers that are being generated")
        self._waiting = self._gauge("requests_waiting", "Requests that wait for their turn")
        self._promised = self._gauge(
            "kv_promised_tokens",
            "Tokens of the targets' KV caches that running answers were promised: prompt and all they may become",
        )
        self._tasks = self._gauge("tasks", "Tasks of the gateway's event loop; without requests it returns to its base")
        self._connections = self._gauge("connections_open", "Connections of clients, idle ones included")
        self._backend_up = Gauge(
            "tandem_backend_up", "1 while a service can be used, else 0", ["backend"], registry=self.registry
        )
        self._http = self._labelled(
            "http_requests",
            'HTTP requests by route template ("other": no such route) and status class: '
            "sum by (route) (rate(tandem_http_requests_total[5m]))",
            "route",
            "status",
        )

    def observe_round(self, outcome: Round, *, is_first: bool) -> None:
        """Count one round. The first round of an answer is its prefill: it counts, but its time says nothing here."""
        if outcome.num_drafted:
            self._drafts.inc()
            self._draft_tokens.inc(outcome.num_drafted)
            self._by_draft.observe(outcome)
            self._prepared.inc(outcome.prepared)
            self._accepted.inc(outcome.num_accepted)
            self._wasted.inc(outcome.num_drafted - outcome.num_accepted)
            for counter in self._accepted_at[: outcome.num_accepted]:
                counter.inc()
        if outcome.draftless_reason is not None:
            self._draftless[outcome.draftless_reason].inc()
        self._wire_bytes.inc(outcome.num_bytes)
        if is_first:
            return
        self._chosen.observe(outcome.num_drafted)
        for stage, seconds in zip(self._stages, round_seconds(outcome), strict=True):
            stage.observe(seconds)
        if not outcome.num_drafted:
            self._plain_step.observe(outcome.verify_seconds)

    def observe_failover(self, reason: FailoverReason) -> None:
        self._failovers[reason].inc()

    def observe_draft_fault(self, reason: DraftlessReason) -> None:
        """A draft's fault: down, timeout or error."""
        self._draft_faults[reason].inc()

    def observe_dropped(self, num_tokens: int) -> None:
        """Accepted draft tokens past the end of an answer."""
        self._wasted.inc(num_tokens)

    def observe_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def observe_verification(self, rule: Verification) -> None:
        self._rules[rule].inc()

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_answer(self, outcome: Outcome, *, num_tokens: int, seconds_after_first: float) -> None:
        """Count one answer, however it ended."""
        self._requests[outcome].inc()
        self._generation_tokens.inc(num_tokens)
        if num_tokens > 1:
            self._per_token.observe(seconds_after_first / (num_tokens - 1))

    def observe_acceptance_length(self, length: float) -> None:
        self._acceptance_length.observe(length)

    def observe_http(self, *, route: str, status: int) -> None:
        """`route` must be a route's template or "other"; raw paths would make series without end."""
        self._http.labels(route, f"{status // 100}xx").inc()

    def declare_routes(self, routes: list[str]) -> None:
        """Make the series of these route templates exist, at zero."""
        for route in [*routes, "other"]:
            for status in ("2xx", "4xx", "5xx"):
                self._http.labels(route, status)

    def watch_connections(self, connections: Callable[[], int]) -> None:
        """Read this at each scrape."""
        self._connections.set_function(lambda: float(connections()))

    def watch_tasks(self, tasks: Callable[[], int]) -> None:
        """Read this at each scrape."""
        self._tasks.set_function(lambda: float(tasks()))

    def watch(
        self,
        *,
        running: Callable[[], int],
        waiting: Callable[[], int],
        promised_tokens: Callable[[], int],
        target_up: Callable[[], bool],
        draft_up: Callable[[], bool] | None,
    ) -> None:
        """Read these at each scrape. No `draft_up`: no draft service is configured, so none can be down."""
        self._running.set_function(lambda: float(running()))
        self._waiting.set_function(lambda: float(waiting()))
        self._promised.set_function(lambda: float(promised_tokens()))
        self._backend_up.labels("target").set_function(lambda: float(target_up()))
        if draft_up is not None:
            self._backend_up.labels("draft").set_function(lambda: float(draft_up()))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page for a scrape, OpenMetrics or text as the Accept header asks, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"tandem_{name}", documentation, registry=self.registry)

    def _labelled(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"tandem_{name}", documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"tandem_{name}", documentation, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tandem_{name}", documentation, buckets=buckets, registry=self.registry)
