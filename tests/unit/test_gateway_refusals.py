"""The gateway over a real socket, with scripted services behind it: requests and services that are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.schemas import ChatBody, CompletionBody
from tandem.errors import Unavailable
from tests.fakes import (
    FakeFleet,
    alphabet,
    says,
)
from tests.gateways import (
    CHAT,
    COMPLETIONS,
    HELLO,
    gateway,
    listening_gateway,
)


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("content", [b'{"model": x}', b"", b"{", b"\xff", b'{"prompt": NaN}', b"[" * 5000])
async def test_i1_malformed_json_is_a_400(path: str, content: bytes) -> None:
    async with gateway(alphabet) as served:
        response = await served.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("content", [b"[]", b"null", b"123", b'"s"', b"true"])
async def test_i2_a_body_that_is_no_object_is_a_400(content: bytes) -> None:
    async with gateway(alphabet) as served:
        response = await served.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "object" in response.json()["error"]["message"]


async def test_half_a_character_in_json_is_a_400() -> None:
    async with gateway(alphabet) as served:
        response = await served.http.post(
            COMPLETIONS, content=b'{"prompt": "\\ud800"}', headers={"content-type": "application/json"}
        )
    assert response.status_code == 400


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_is_not_declared_as_json_is_a_415(content_type: str) -> None:
    async with listening_gateway(alphabet) as served:
        headers = {"content-type": content_type} if content_type else {}
        response = await served.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=10)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "response_format", "unknown"})


@settings(max_examples=8, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), min_size=12, max_size=12))
async def test_i7_no_body_whatsoever_is_a_5xx(bodies: list[dict[str, object]]) -> None:
    async with gateway(says("hello")) as served:
        for number, changes in enumerate(bodies):  # many for one application, which takes longer to build than to ask
            path, valid = ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}))[number % 2]
            response = await served.http.post(
                path, content=json.dumps({**valid, **changes}), headers={"content-type": "application/json"}
            )
            assert response.status_code in (200, 400, 404), (changes, response.text)
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_i6_unknown_paths_and_methods_have_openais_body() -> None:
    async with gateway(alphabet) as served:
        for response, status in (
            (await served.http.get("/", headers={"accept": "application/json"}), 404),
            (await served.http.get("/nope"), 404),
            (await served.http.get(COMPLETIONS), 405),
            (await served.http.delete("/v1/models"), 405),
        ):
            assert response.status_code == status
            assert response.json()["error"]["message"]
            assert response.headers["x-request-id"]


async def test_a_body_over_the_limit_is_a_413_before_it_is_parsed() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    async with listening_gateway(alphabet, max_body_bytes=1000) as served:
        for path in (COMPLETIONS, "/nope"):
            response = await served.http.post(path, content=b"x" * 1001)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        with contextlib.suppress(httpx.WriteError):  # the server may close before all is written
            assert (await served.http.post(COMPLETIONS, content=chunks())).status_code == 413
        assert (await served.post(COMPLETIONS, {"prompt": "a"})).status_code == 200


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async with listening_gateway(alphabet, body_timeout_seconds=0.1) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 408")


async def test_a_fault_of_our_own_is_a_500_without_details(logs: list[MutableMapping[str, Any]]) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (0, KeyError("secret"))
    async with gateway(fleet) as served:
        response = await served.post(COMPLETIONS, {"prompt": "a"})
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in response.json()["error"]["message"]
    failures = [entry for entry in logs if entry["event"] == "request_failed"]
    assert [(entry["error"], entry["log_level"]) for entry in failures] == [("KeyError", "error")]


async def test_logs_say_how_requests_went_and_nothing_of_what_they_said(logs: list[MutableMapping[str, Any]]) -> None:
    async with gateway(says("open sesame")) as served:
        await served.post(COMPLETIONS, {"prompt": "sesame", "user": "sesame"})
        await served.events(CHAT, {"messages": [{"role": "user", "content": "sesame"}]})
        await served.http.get("/sesame?key=sesame", headers={"authorization": "Bearer sesame"})
        await served.post(COMPLETIONS, {"prompt": ["sesame", 5]})
        await served.post(CHAT, {"messages": [{"role": "sesame", "content": "sesame"}]})
    entries = [entry for entry in logs if entry["event"] == "request"]
    assert [(entry["route"], entry["status"]) for entry in entries] == [
        (COMPLETIONS, 200),
        (CHAT, 200),
        ("other", 404),
        (COMPLETIONS, 400),
        (CHAT, 400),
    ]
    assert "sesame" not in repr(logs)


async def test_a_target_that_is_down_is_a_503_streaming_or_not() -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.target.fail_at = (0, Unavailable("target 127.0.0.1:1: not reached yet"))
    async with gateway(fleet) as served:
        for stream in (False, True):
            response = await served.post(COMPLETIONS, {"prompt": "a", "stream": stream})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
        fleet.model = None
        assert (await served.http.get("/v1/models")).status_code == 503


async def test_the_request_id_is_the_clients_where_that_is_harmless() -> None:
    async with gateway(alphabet) as served:
        for given, kept in (("abc-1.2_3:4", True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)):
            headers = [(b"x-request-id", given.encode())]
            response = await served.http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert (response.headers["x-request-id"] == given) is kept
            assert served.fleet.target.starts[-1].request_id == response.headers["x-request-id"]
