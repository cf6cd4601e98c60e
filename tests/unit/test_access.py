"""API keys: who is let in, from a file that may change at any time, and what nobody gets to see."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import structlog

from gateway.access import ApiKeys, bearer_token, parse_keys
from gateway.app import create_app
from gateway.metrics import GatewayMetrics
from gateway.served import Readiness
from gateway.settings import Settings
from tandem.errors import InvalidRequest
from tests.fakes import FakeFleet, alphabet, serving
from tests.gateways import COMPLETIONS

ALICE = "alice-0123456789abcdef"
BOB = "bob/0123+456789.~_-abc=="
NAMELESS = "nameless-0123456789"
OPEN = {"/health", "/health/live", "/health/ready", "/"}


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as entries:
        yield entries


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    bob = hashlib.sha256(BOB.encode()).hexdigest()
    path.write_text(f"# who may ask\nalice:{ALICE}\n\nbob:sha256:{bob}  # only its hash\n  {NAMELESS}\n")
    return path


@asynccontextmanager
async def locked(keys: ApiKeys, fleet: FakeFleet | None = None) -> AsyncIterator[str]:
    """A gateway on a real socket that asks for one of `keys`; its address."""
    metrics = GatewayMetrics(max_num_draft_tokens=16)
    app = create_app(Settings(), fleet or FakeFleet.following(alphabet), metrics, keys=keys)
    async with serving(app) as url:
        yield url


def test_keys_are_read_with_names_without_and_as_hashes(file: Path) -> None:
    keys = ApiKeys(file)
    assert keys.owner(ALICE) == "alice"
    assert keys.owner(BOB) == "bob"
    assert keys.owner(NAMELESS) == hashlib.sha256(NAMELESS.encode()).hexdigest()[:8]
    for wrong in ("", "alice", ALICE[:-1], ALICE + "x", ALICE.upper(), hashlib.sha256(BOB.encode()).hexdigest(), "é"):
        assert keys.owner(wrong) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("alice:short", "line 1: a key has 16"),
        ("\n\nalice:0123456789 abcdefgh", "line 3: a key has 16"),
        ("0123456789abcdef€", "line 1: a key has 16"),
        ("a b:0123456789abcdef", "line 1: a name has"),
        ("alice:sha256:12ab", "line 1: sha256: is followed by 64"),
        ("sha256:" + "g" * 64, "line 1: sha256: is followed by 64"),
        ("0123456789abcdef\nbob:0123456789abcdef", "line 2: this key stands on an earlier line too"),
        ("\n".join(f"{number:020d}" for number in range(1001)), "line 1001: there are more than 1000 keys"),
    ],
)
def test_a_line_that_is_no_key_is_named_and_not_repeated(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as raised:
        parse_keys(text)
    assert not any(secret in raised.value.message for secret in ("short", "0123456789"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * (1 << 20) + b"y"])
def test_a_file_that_cannot_be_used_is_named_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"api_keys_file .*/keys"):
        ApiKeys(path)


def test_a_key_is_revoked_by_deleting_its_line_and_added_by_writing_one(
    file: Path, logs: list[MutableMapping[str, Any]]
) -> None:
    now = 100.0
    keys = ApiKeys(file, clock=lambda: now)
    file.write_text(f"alice:{ALICE}\nnew:0123456789abcdef")
    now += 0.9
    assert keys.owner(BOB) == "bob"  # not yet looked at again
    now += 0.2
    assert keys.owner(BOB) is None
    assert keys.owner("0123456789abcdef") == "new"
    file.write_text("# nobody\n")
    now += 1.1
    assert keys.owner(ALICE) is None
    assert [entry["keys"] for entry in logs if entry["event"] == "api_keys_read"] == [3, 2, 0]
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["api_keys_empty"]


def test_a_broken_file_leaves_the_keys_as_they_were_and_is_told_once(
    file: Path, logs: list[MutableMapping[str, Any]]
) -> None:
    now = 0.0
    keys = ApiKeys(file, clock=lambda: now)
    good = file.read_text()
    for broken in ("alice:short", "alice:short", None, None):
        if broken is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(broken)
        now += 2
        assert keys.owner(ALICE) == "alice"
    assert [entry["event"] for entry in logs] == ["api_keys_read", "api_keys_unchanged", "api_keys_unchanged"]
    file.write_text(good)
    now += 2
    assert keys.owner(ALICE) == "alice"
    file.write_text(good.replace(ALICE, "another-0123456789"))
    now += 2
    assert keys.owner(ALICE) is None
    assert not any(secret in repr(logs) for secret in (ALICE, BOB, NAMELESS, "short"))


def test_l2_keys_are_compared_in_constant_time_and_all_of_them() -> None:
    """L2: `!=` on a key tells by its time how much of it is right. Of the code, as no test can time it well enough."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(ApiKeys.owner))).body
    (loop,) = [node for node in ast.walk(function) if isinstance(node, ast.For)]
    assert "hmac.compare_digest(" in ast.unparse(loop)
    for node in ast.walk(function):
        assert not isinstance(node, ast.Compare | ast.Break)
    assert not any(isinstance(node, ast.Return) for node in ast.walk(loop))


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("abc", None), ("", None), ("Bearer ", None)],
)
def test_the_key_is_what_follows_bearer(header: str, token: str | None) -> None:
    assert bearer_token(header) == token


async def test_l1_every_route_but_health_and_the_page_wants_a_key(file: Path) -> None:
    """L1: a key that guards only some routes."""
    metrics = GatewayMetrics(max_num_draft_tokens=16)
    app = create_app(Settings(), FakeFleet.following(alphabet), metrics, keys=ApiKeys(file))
    routes = set(re.findall(r'route="(/[^"]*)"', metrics.exposition("")[0].decode()))  # all that there are
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model_id}", "/metrics"} <= routes
    paths = {*routes, "/openapi.json", "/nope", "/v1", "//v1/models", "/health/live/", "/page", "/pages/x"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for path in {path for path in paths if path not in OPEN and not path.startswith("/page/")}:
            for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
                for headers in ({}, {"authorization": "Bearer wrong-0123456789abcdef"}, {"authorization": ALICE}):
                    refused = await http.request(method, path.replace("{model_id}", "tandem"), headers=headers)
                    assert refused.status_code == 401, (method, path)
                    assert refused.headers["www-authenticate"] == "Bearer"
                    assert refused.headers["x-request-id"]
                    if method != "HEAD":
                        error = refused.json()["error"]
                        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        for path in OPEN:
            assert (await http.get(path)).status_code != 401
        allowed = {"authorization": f"Bearer {ALICE}"}
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert (await http.get(path, headers=allowed)).status_code == 200
        assert (await http.get("/nope", headers=allowed)).status_code == 404


async def test_readiness_is_told_to_everyone_and_its_reasons_to_who_has_a_key(file: Path) -> None:
    fleet = FakeFleet.following(alphabet)
    fleet.state = Readiness("degraded", ("draft 10.0.0.7:50052: not reached yet",))
    async with locked(ApiKeys(file), fleet) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/health/ready")).json() == {"status": "degraded", "reasons": []}
        told = await http.get("/health/ready", headers={"authorization": f"Bearer {BOB}"})
        assert told.json() == {"status": "degraded", "reasons": list(fleet.state.reasons)}


async def test_the_official_client_is_let_in_with_a_key_and_raises_its_own_error_without(
    file: Path, logs: list[MutableMapping[str, Any]]
) -> None:
    async with locked(ApiKeys(file)) as url:
        for key, owner in ((ALICE, "alice"), (BOB, "bob"), ("wrong-0123456789abcdef", None)):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                if owner is not None:
                    await client.completions.create(model="tandem", prompt="a", max_tokens=2)
                    stream = await client.completions.create(model="tandem", prompt="a", max_tokens=2, stream=True)
                    assert [chunk async for chunk in stream]
                    continue
                with pytest.raises(openai.AuthenticationError) as raised:
                    await client.completions.create(model="tandem", prompt="a", max_tokens=2)
                assert raised.value.code == "invalid_api_key"
                assert "not known here" in raised.value.message
    requests = [entry for entry in logs if entry["event"] == "request"]
    owners = [(entry.get("client"), entry["status"]) for entry in requests]
    assert owners == [("alice", 200)] * 2 + [("bob", 200)] * 2 + [(None, 401)]
    assert not any(key in repr(logs) for key in (ALICE, BOB, "wrong-"))


async def test_who_has_no_key_is_refused_before_a_body_is_read(file: Path) -> None:
    asked: list[bool] = []

    async def body() -> AsyncIterator[bytes]:
        asked.append(True)
        yield b"{}"

    app = create_app(
        Settings(), FakeFleet.following(alphabet), GatewayMetrics(max_num_draft_tokens=16), keys=ApiKeys(file)
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.post(COMPLETIONS, content=body())).status_code == 401
    assert not asked
