"""One request through three real services: one id in all their logs, and, where traces are on, one trace."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.stack import Service, Stack

BODY = {"model": "tandem", "prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@contextmanager
def receiver() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP receiver's address, and the bodies that it has been sent."""
    bodies: list[bytes] = []

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receive)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _events(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def _ask(stack: Stack, request_id: str, **changes: Any) -> None:
    response = stack.client.post(
        f"{stack.url}/v1/completions", json={**BODY, **changes}, headers={"x-request-id": request_id}
    )
    assert response.headers["x-request-id"] == request_id


def _lines(stack: Stack, request_id: str) -> dict[str, list[dict[str, Any]]]:
    """The log lines of each service that carry this id."""
    return {
        service.module: [event for event in _events(service) if event.get("request_id") == request_id]
        for service in stack.services
    }


def test_one_id_is_in_the_logs_of_all_three_services(stack: Stack) -> None:
    _ask(stack, "told-apart:1")
    _until(lambda: all(_lines(stack, "told-apart:1").values()), "the services' logs do not have the id")
    lines = _lines(stack, "told-apart:1")
    (gateway,), (target,), (draft,) = lines["gateway"], lines["target_service"], lines["draft_service"]
    assert (gateway["event"], gateway["status"], gateway["service"]) == ("request", 200, "gateway")
    assert (target["event"], target["method"], target["ended"], target["service"]) == (
        "session",
        "Verify",
        "closed",
        "target",
    )
    assert (draft["event"], draft["method"], draft["ended"], draft["service"]) == (
        "session",
        "Propose",
        "closed",
        "draft",
    )
    assert 0 < target["seconds"] < gateway["seconds"] + 1.0


def test_a_session_for_each_answer_carries_its_requests_id(stack: Stack) -> None:
    _ask(stack, "several", n=2)
    _until(lambda: len(_lines(stack, "several")["target_service"]) == 2, "two sessions, two lines")


def test_an_id_that_could_forge_a_log_line_gets_no_further_than_the_door(stack: Stack) -> None:
    response = stack.client.post(f"{stack.url}/v1/completions", json=BODY, headers={"x-request-id": 'x" level="error'})
    given = response.headers["x-request-id"]
    assert len(given) == 32
    _until(lambda: all(_lines(stack, given).values()), "the services' logs do not have the id that was made")


def test_one_trace_goes_through_all_three_services(
    tmp_path: Path, target_folder: Path, draft_folder: Callable[[float], Path]
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with receiver() as (endpoint, bodies):
        with Stack(
            folder=tmp_path,
            target_model=str(target_folder),
            draft_model=str(draft_folder(0.05)),
            settings={"TANDEM_TRACING_ENDPOINT": endpoint},
        ) as stack:
            _ask(stack, "traced", seed=3)
            for service in reversed(stack.services):
                assert service.stop() == 0  # each sends what it has before it ends
    spans: dict[str, list[Any]] = {}
    for body in bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                spans.setdefault(names["service.name"], []).extend(scope.spans)
    assert spans.keys() == {"tandem-gateway", "tandem-target", "tandem-draft"}
    (request,) = [span for span in spans["tandem-gateway"] if span.name == "request"]
    rounds = [span for span in spans["tandem-gateway"] if span.name == "round"]
    (verify,), (propose,) = spans["tandem-target"], spans["tandem-draft"]
    assert (verify.name, propose.name) == ("Verify", "Propose")
    everything = [request, *rounds, verify, propose]
    assert {span.trace_id for span in everything} == {request.trace_id}
    assert {span.parent_span_id for span in everything[1:]} == {request.span_id}
    told = [{entry.key: entry.value for entry in span.attributes} for span in rounds]
    assert sum(one["tandem.num_tokens"].int_value for one in told) == BODY["max_tokens"]
    assert any(one["tandem.num_accepted"].int_value > 0 for one in told)
    assert all(one["tandem.verify_forward_seconds"].double_value > 0 for one in told)
    trace_ids = {event.get("trace_id") for event in _events(stack.gateway) if event["event"] == "request"}
    assert request.trace_id.hex() in trace_ids
