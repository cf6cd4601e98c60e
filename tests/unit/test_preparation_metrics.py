"""The draft service's counters of prepared drafts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from draft_service.drafters.base import PREPARED_OUTCOMES
from draft_service.metrics import PreparationMetrics
from tests.promtool import check_metrics


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"tandem_{name}_total", labels)


def test_every_series_is_there_at_zero() -> None:
    registry = CollectorRegistry()
    PreparationMetrics(registry)
    assert {value(registry, "prepared_drafts", outcome=outcome) for outcome in PREPARED_OUTCOMES} == {0.0}
    for name in ("prepared_draft_tokens", "prepared_draft_tokens_wasted", "prepared_seconds_saved"):
        assert value(registry, name) == 0.0
    check_metrics(generate_latest(registry).decode())


def test_counters_are_sums() -> None:
    registry = CollectorRegistry()
    metrics = PreparationMetrics(registry)
    for _ in range(3):
        metrics.token_prepared()
    metrics.tokens_used(seconds=0.25)
    metrics.tokens_wasted(2)
    metrics.prepared("hit")
    metrics.prepared("partial")
    metrics.prepared("hit")
    assert value(registry, "prepared_draft_tokens") == 3
    assert value(registry, "prepared_draft_tokens_wasted") == 2
    assert value(registry, "prepared_seconds_saved") == 0.25
    assert value(registry, "prepared_drafts", outcome="hit") == 2
    assert value(registry, "prepared_drafts", outcome="partial") == 1
    assert value(registry, "prepared_drafts", outcome="miss") == 0
