"""What the draft service tells Prometheus beside `tandem/service_metrics.py`: what comes of preparing drafts.

* hit rate: rate(tandem_prepared_drafts_total{outcome="hit"}[5m]) / sum(rate(tandem_prepared_drafts_total[5m]))
* prepared tokens that nobody asked for: rate(tandem_prepared_draft_tokens_wasted_total[5m])
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from draft_service.drafters.base import PREPARED_OUTCOMES, PreparedOutcome


class PreparationMetrics:
    """PreparationObserver. All series exist from the start, at zero."""

    def __init__(self, registry: CollectorRegistry) -> None:
        drafts = Counter(
            "tandem_prepared_drafts",
            "Rounds by what came of preparing their draft while the target verified: hit (all of it was there when it "
            "was asked for), partial, miss (another outcome came, or it came too soon), busy (left out: others had "
            "work for the model), cancelled (the text ended, or went on without the model)",
            ["outcome"],
            registry=registry,
        )
        self._drafts = {outcome: drafts.labels(outcome) for outcome in PREPARED_OUTCOMES}
        self._tokens = Counter("tandem_prepared_draft_tokens", "Tokens drafted ahead", registry=registry)
        self._wasted = Counter(
            "tandem_prepared_draft_tokens_wasted",
            "Tokens drafted ahead for outcomes that did not come. Share: "
            "rate(tandem_prepared_draft_tokens_wasted_total[5m]) / rate(tandem_prepared_draft_tokens_total[5m])",
            registry=registry,
        )
        self._saved = Counter(
            "tandem_prepared_seconds_saved",
            "Time of the forwards that drafted ahead what was then asked for",
            registry=registry,
        )

    def token_prepared(self) -> None:
        self._tokens.inc()

    def tokens_used(self, *, seconds: float) -> None:
        self._saved.inc(seconds)

    def tokens_wasted(self, num_tokens: int) -> None:
        self._wasted.inc(num_tokens)

    def prepared(self, outcome: PreparedOutcome) -> None:
        self._drafts[outcome].inc()
