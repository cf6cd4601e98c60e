"""The gateway's /metrics page: complete from the start, exact, and valid to Prometheus."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.failover import FailoverReason
from gateway.metrics import GatewayMetrics
from gateway.speculate import Round
from tandem.types import DraftlessReason, ServiceTimes, TokenOrigin
from tests.promtool import check_metrics

ACCEPT_OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def new_metrics() -> GatewayMetrics:
    metrics = GatewayMetrics(max_num_draft_tokens=4)
    metrics.declare_routes(["/v1/completions"])
    metrics.watch(
        running=lambda: 2, waiting=lambda: 1, promised_tokens=lambda: 0, target_up=lambda: True, draft_up=lambda: False
    )
    metrics.watch_tasks(lambda: 7)
    return metrics


def samples(metrics: GatewayMetrics) -> dict[str, float]:
    """name{label="value"} to value."""
    page, _ = metrics.exposition("")
    found: dict[str, float] = {}
    for family in parse_text(page.decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def drafted(num_drafted: int, num_accepted: int, *, prepared: bool = False) -> Round:
    return Round(
        token_ids=tuple(range(num_accepted + 1)),
        origins=(*[TokenOrigin.ACCEPTED] * num_accepted, TokenOrigin.RECOVERED),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        draftless_reason=None,
        draft_seconds=0.5,
        draft_service_seconds=0.25,
        verify_seconds=1.0,
        verify_times=ServiceTimes(queue_seconds=0.25, forward_seconds=0.5),
        num_bytes=100,
        prepared=prepared,
    )


def plain(reason: DraftlessReason, seconds: float) -> Round:
    return Round(
        token_ids=(1,),
        origins=(TokenOrigin.PLAIN,),
        num_drafted=0,
        num_accepted=0,
        draftless_reason=reason,
        verify_seconds=seconds,
    )


def test_k1_counters_are_exact_sums() -> None:
    metrics = new_metrics()
    metrics.observe_round(plain(DraftlessReason.FIRST, 9.0), is_first=True)
    metrics.observe_round(drafted(4, 4, prepared=True), is_first=False)
    metrics.observe_round(drafted(4, 1), is_first=False)
    metrics.observe_round(plain(DraftlessReason.LIMIT, 0.5), is_first=False)
    metrics.observe_dropped(2)
    found = samples(metrics)
    assert found["tandem_spec_decode_num_drafts_total"] == 2
    assert found["tandem_spec_decode_num_draft_tokens_total"] == 8
    assert found["tandem_spec_decode_num_accepted_tokens_total"] == 5
    per_position = [found[f'tandem_spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(4)]
    assert per_position == [2, 1, 1, 1]
    assert found["tandem_wasted_draft_tokens_total"] == 3 + 2
    assert found["tandem_prepared_hits_total"] == 1
    assert found["tandem_wire_bytes_total"] == 200
    assert found['tandem_draftless_rounds_total{reason="first"}'] == 1
    assert found['tandem_draftless_rounds_total{reason="limit"}'] == 1
    assert found['tandem_round_seconds_sum{stage="draft"}'] == 0.5
    assert found['tandem_round_seconds_sum{stage="verify"}'] == 1.5
    assert found['tandem_round_seconds_sum{stage="network"}'] == 1.0 + 0.5
    assert found["tandem_plain_step_seconds_sum"] == 0.5
    assert found["tandem_plain_step_seconds_count"] == 1
    assert found["tandem_draft_tokens_per_round_count"] == 3


def test_answers_and_http_requests_are_counted() -> None:
    metrics = new_metrics()
    metrics.observe_prompt(10)
    metrics.observe_first_token(0.5)
    metrics.observe_answer("stop", num_tokens=5, seconds_after_first=2.0)
    metrics.observe_answer("cancelled", num_tokens=1, seconds_after_first=0.0)
    metrics.observe_acceptance_length(2.5)
    metrics.observe_http(route="/v1/completions", status=404)
    found = samples(metrics)
    assert found["tandem_prompt_tokens_total"] == 10
    assert found["tandem_generation_tokens_total"] == 6
    assert found['tandem_requests_total{finish_reason="stop"}'] == 1
    assert found['tandem_requests_total{finish_reason="cancelled"}'] == 1
    assert found["tandem_time_to_first_token_seconds_sum"] == 0.5
    assert found["tandem_time_per_output_token_seconds_sum"] == 0.5
    assert found["tandem_time_per_output_token_seconds_count"] == 1
    assert found["tandem_request_acceptance_length_sum"] == 2.5
    assert found['tandem_http_requests_total{route="/v1/completions",status="4xx"}'] == 1
    assert found["tandem_requests_running"] == 2
    assert found["tandem_requests_waiting"] == 1
    assert found["tandem_tasks"] == 7
    assert found['tandem_backend_up{backend="target"}'] == 1
    assert found['tandem_backend_up{backend="draft"}'] == 0


def test_k9_every_series_exists_at_zero_before_any_traffic() -> None:
    found = samples(new_metrics())
    for reason in DraftlessReason:
        assert found[f'tandem_draftless_rounds_total{{reason="{reason.value}"}}'] == 0
    for fault in ("down", "timeout", "error"):
        assert found[f'tandem_draft_faults_total{{reason="{fault}"}}'] == 0
    for failover in FailoverReason:
        assert found[f'tandem_failovers_total{{reason="{failover.value}"}}'] == 0
    for position in range(4):
        assert found[f'tandem_spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}}'] == 0
    for finish_reason in ("stop", "length", "cancelled", "error"):
        assert found[f'tandem_requests_total{{finish_reason="{finish_reason}"}}'] == 0
    for stage in ("draft", "verify", "network"):
        assert found[f'tandem_round_seconds_count{{stage="{stage}"}}'] == 0
    for status in ("2xx", "4xx", "5xx"):
        assert found[f'tandem_http_requests_total{{route="other",status="{status}"}}'] == 0


def test_k3_there_are_no_created_series() -> None:
    for accept in ("", ACCEPT_OPENMETRICS):
        page, _ = new_metrics().exposition(accept)
        assert b"_created" not in page


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("", "text/plain"), ("*/*", "text/plain"), (ACCEPT_OPENMETRICS, "application/openmetrics-text")],
)
def test_k4_the_page_is_valid_in_both_formats(accept: str, content_type: str) -> None:
    metrics = new_metrics()
    metrics.observe_round(drafted(4, 1), is_first=False)
    page, given = metrics.exposition(accept)
    assert given.startswith(content_type)
    parse = parse_openmetrics if accept == ACCEPT_OPENMETRICS else parse_text
    families = list(parse(page.decode()))
    assert all(family.name.startswith(("tandem_", "process_")) and family.documentation for family in families)


def test_k4_promtool_has_nothing_to_say() -> None:
    page, _ = new_metrics().exposition("")
    check_metrics(page.decode())


def test_two_gateways_in_one_process_share_nothing() -> None:
    one, other = new_metrics(), new_metrics()
    one.observe_prompt(5)
    assert samples(other)["tandem_prompt_tokens_total"] == 0


def test_rounds_are_told_apart_by_draft_and_the_label_is_bounded() -> None:
    metrics = new_metrics()
    for number in range(40):
        metrics.observe_round(replace(drafted(4, 3), drafted_by=f"draft-{number % 20}"), is_first=False)
    found = samples(metrics)
    assert found['tandem_draft_rounds_total{draft="draft-0"}'] == 2
    assert found['tandem_draft_tokens_total{draft="draft-0"}'] == 8
    assert found['tandem_draft_accepted_tokens_total{draft="draft-0"}'] == 6
    rounds = [value for name, value in found.items() if name.startswith("tandem_draft_rounds_total")]
    assert len(rounds) == 17
    assert found['tandem_draft_rounds_total{draft="other"}'] == 2 * 4
    assert sum(rounds) == found["tandem_spec_decode_num_drafts_total"] == 40
