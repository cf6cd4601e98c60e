"""Traces: which spans there are, what they say and what they do not, and that without them nothing is imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import httpx
import pytest
import structlog
from pydantic import ValidationError

from gateway.app import create_app
from gateway.metrics import GatewayMetrics
from gateway.settings import Settings
from tandem.rpc.metadata import call_metadata, outgoing_metadata
from tandem.settings import TracingSettings
from tandem.tracing import NoTracing, start_tracing
from tests.fakes import FakeFleet, alphabet
from tests.gateways import COMPLETIONS

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as entries:
        yield entries


async def _spans_of(fleet: FakeFleet, *requests: dict[str, Any], sample_ratio: float = 1.0) -> list[Any]:
    """The spans that these requests, each httpx's `post` arguments, leave in an in-memory exporter."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from tandem.otel import OtelTracing

    exporter = InMemorySpanExporter()
    tracing = OtelTracing("gateway", SimpleSpanProcessor(exporter), sample_ratio=sample_ratio)
    app = create_app(Settings(num_draft_tokens=4), fleet, GatewayMetrics(max_num_draft_tokens=16), tracing=tracing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        await http.get("/health/ready")
        await http.get("/metrics")
        await asyncio.gather(*(http.post(COMPLETIONS, **request) for request in requests))
    tracing.close()
    return list(exporter.get_finished_spans())


async def test_a_request_is_a_span_and_its_queueing_and_rounds_lie_below_it() -> None:
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 0}
    spans = await _spans_of(FakeFleet.following(alphabet), {"json": body, "headers": {"x-request-id": "r-1"}})
    (request,) = [span for span in spans if span.name == "request"]
    assert request.parent is None
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": COMPLETIONS,
        "http.response.status_code": 200,
        "tandem.request_id": "r-1",
    }
    below = [span for span in spans if span is not request]
    assert {span.parent.span_id for span in below} == {request.context.span_id}
    assert [span.name for span in below] == ["queue", "round", "round", "round", "round"]
    rounds = [span.attributes for span in below if span.name == "round"]
    assert [(one["tandem.num_draft_tokens"], one["tandem.num_accepted"]) for one in rounds] == [
        (0, 0),
        (4, 4),
        (4, 4),
        (0, 0),
    ]
    assert [one.get("tandem.draftless_reason") for one in rounds] == ["first", None, None, "limit"]
    assert sum(one["tandem.num_tokens"] for one in rounds) == 12
    for span in below:
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
        if span.name == "round":
            stages = ("draft", "verify", "network")
            lasted = (span.end_time - span.start_time) / 1e9
            assert sum(span.attributes[f"tandem.{stage}_seconds"] for stage in stages) == pytest.approx(
                lasted, abs=1e-6
            )


async def test_a_trace_that_the_client_has_begun_goes_on_and_is_named_in_the_log(
    logs: list[MutableMapping[str, Any]],
) -> None:
    request = {"json": {"prompt": "a", "max_tokens": 1}, "headers": {"traceparent": PARENT}}
    spans = await _spans_of(FakeFleet.following(alphabet), request)
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE_ID}
    (line,) = [entry for entry in logs if entry["event"] == "request" and entry["route"] == COMPLETIONS]
    assert line["trace_id"] == TRACE_ID


async def test_requests_at_once_have_traces_of_their_own() -> None:
    requests = [{"json": {"prompt": "abc", "max_tokens": 9, "n": n}} for n in (1, 2, 3)]
    spans = await _spans_of(FakeFleet.following(alphabet), *requests)
    by_trace: dict[int, list[Any]] = {}
    for span in spans:
        by_trace.setdefault(span.context.trace_id, []).append(span)
    answers = sorted(
        len({span.attributes["tandem.sample"] for span in below if span.name == "round"}) for below in by_trace.values()
    )
    assert answers == [1, 2, 3]


async def test_no_span_holds_a_text() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (1, KeyError("open sesame"))
    body = {"prompt": "open sesame", "max_tokens": 4, "stop": ["sesame"]}
    headers = {"authorization": "Bearer open-sesame"}
    spans = await _spans_of(fleet, {"json": body, "headers": headers}, {"content": "open sesame"})
    assert len([span for span in spans if span.name == "request"]) == 2
    assert not any("sesame" in span.to_json() for span in spans)


async def test_a_share_of_requests_can_be_traced_and_who_asks_may_decide() -> None:
    traced = {"json": {"prompt": "a", "max_tokens": 1}, "headers": {"traceparent": PARENT}}
    untraced = {"json": {"prompt": "a", "max_tokens": 1}}
    spans = await _spans_of(FakeFleet.following(alphabet), traced, untraced, sample_ratio=0.0)
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE_ID}


def test_calls_carry_the_requests_id_and_trace_and_only_inside_of_it() -> None:
    assert call_metadata() == ()
    with outgoing_metadata("r-1", {"traceparent": PARENT}):
        assert call_metadata() == (("x-request-id", "r-1"), ("traceparent", PARENT))
    assert call_metadata() == ()


@pytest.mark.parametrize("module", ["gateway.__main__", "target_service.servicer", "draft_service.__main__"])
def test_without_an_endpoint_the_sdk_is_not_even_imported(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        "from tandem.settings import TracingSettings\n"
        "from tandem.tracing import start_tracing\n"
        "start_tracing('x', TracingSettings())\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "print([name for name in sys.modules if name.startswith(parts)])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


def test_traces_are_off_unless_an_address_is_given() -> None:
    assert isinstance(start_tracing("gateway", TracingSettings()), NoTracing)
    assert isinstance(start_tracing("gateway", TracingSettings(endpoint="")), NoTracing)
    assert TracingSettings(endpoint="http://collector:4318/").traces_url == "http://collector:4318/v1/traces"
    assert TracingSettings(endpoint="https://x/otlp/v1/traces").traces_url == "https://x/otlp/v1/traces"
    for wrong in ("collector:4318", "http://", "ftp://x"):
        with pytest.raises(ValidationError, match="endpoint"):
            TracingSettings(endpoint=wrong)


def test_a_missing_package_is_named_with_the_remedy() -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry.sdk'] = None\n"
        "sys.modules['opentelemetry.exporter'] = None\n"
        "from tandem.rpc.launch import run_process\n"
        "from tandem.settings import TracingSettings\n"
        "from tandem.tracing import start_tracing\n"
        "sys.exit(run_process('gateway', lambda: start_tracing('gateway', TracingSettings(endpoint='http://x:1'))))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "tandem-serve[tracing]" in ended.stderr
    assert "Traceback" not in ended.stderr
