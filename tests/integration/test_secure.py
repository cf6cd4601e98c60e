"""All three services with everything locked: mutual TLS between them, HTTPS and keys at the gateway, logs at DEBUG."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import httpx2
import openai
import pytest

from tandem.rpc.healthcheck import is_serving
from tests.certificates import Certificates
from tests.stack import Service, Stack

KEY = "key-marker-5f3e9a7c1b2d4e60"
OTHER_KEY = "key-marker-0000000000000000"
MARKER = "prompt-marker"
PROMPT_IDS = [191, 83, 197, 89, 193, 97]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory,
    target_folder: Path,
    draft_folder: Callable[[float], Path],
    certificates: Certificates,
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("secured")
    (folder / "api-keys").write_text(f"tester:{KEY}\nother:{OTHER_KEY}\n")
    stack = Stack(
        folder=folder,
        target_model=str(target_folder),
        draft_model=str(draft_folder(0.05)),
        settings={
            **certificates.environment(),
            "TANDEM_GATEWAY_API_KEYS_FILE": str(folder / "api-keys"),
            "TANDEM_LOG_LEVEL": "DEBUG",
        },
    )
    stack.url = f"https://localhost:{stack.gateway_port}"
    stack.client = httpx.Client(verify=_trusting(certificates), headers=_bearer(KEY), timeout=60)
    with stack:
        yield stack


def _trusting(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates.ca))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _ready(address: str, credentials: grpc.ChannelCredentials | None) -> bool:
    return is_serving(address, timeout_seconds=3.0, credentials=credentials)


def test_answers_come_through_tls_and_drafts_are_accepted(secured: Stack, certificates: Certificates) -> None:
    answer = secured.complete(prompt=PROMPT_IDS, max_tokens=32, temperature=0)
    assert answer["speculation"]["accepted"] > 0
    with httpx2.Client(verify=_trusting(certificates)) as http:
        client = openai.OpenAI(base_url=f"{secured.url}/v1", api_key=KEY, http_client=http, max_retries=0)
        stream = client.completions.create(model="tandem", prompt=PROMPT_IDS, max_tokens=32, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == answer["choices"][0]["text"]


def test_the_gateway_speaks_no_plain_http_and_no_old_tls(secured: Stack, certificates: Certificates) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://localhost:{secured.gateway_port}/health/live")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secured.url}/health/live")  # the authority is ours, not the world's
    old = _trusting(certificates)
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(httpx.ConnectError, match=r"PROTOCOL_VERSION|UNEXPECTED_EOF"):  # by the server
        httpx.get(f"{secured.url}/health/live", verify=old)


@pytest.mark.parametrize("service", ["target", "draft"])
def test_a_service_answers_only_who_has_a_certificate_of_its_authority(
    secured: Stack, certificates: Certificates, service: str, tmp_path: Path
) -> None:
    address = f"localhost:{secured.target_port if service == 'target' else secured.draft_port}"
    strangers = Certificates.make(tmp_path / "strangers")
    mixed = grpc.ssl_channel_credentials(  # trusts ours, shows a stranger's
        certificates.ca.read_bytes(),
        strangers.key("gateway").read_bytes(),
        strangers.certificate("gateway").read_bytes(),
    )
    assert _ready(address, certificates.channel("gateway"))
    assert not _ready(address, None)
    assert not _ready(address, grpc.ssl_channel_credentials(certificates.ca.read_bytes()))
    assert not _ready(address, mixed)
    assert not _ready(address, strangers.channel("gateway"))


def test_the_containers_health_check_works_over_mutual_tls(secured: Stack, certificates: Certificates) -> None:
    address = f"127.0.0.1:{secured.target_port}"
    files = (
        f"--ca={certificates.ca}",
        f"--certificate={certificates.certificate('target')}",
        f"--key={certificates.key('target')}",
    )
    command = [sys.executable, "-m", "tandem.rpc.healthcheck"]
    for arguments, code in (
        ((*files, address), 0),
        ((address,), 1),
        ((files[1].replace("target", "nope"), address), 1),
    ):
        assert subprocess.run([*command, *arguments], timeout=60, check=False, capture_output=True).returncode == code
    bad = (f"--ca={certificates.key('target')}", address)
    ended = subprocess.run([*command, *bad], timeout=60, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "holds no authority's certificate" in ended.stderr


def test_a_key_is_revoked_while_the_gateway_runs(secured: Stack) -> None:
    def status() -> int:
        return secured.client.get(f"{secured.url}/v1/models", headers=_bearer(OTHER_KEY)).status_code

    assert status() == 200
    file = secured.folder / "api-keys"
    file.write_text(f"tester:{KEY}\n")
    end = time.monotonic() + 10
    while status() == 200:
        assert time.monotonic() < end, "still let in"
        time.sleep(0.1)
    assert status() == 401
    assert secured.client.get(f"{secured.url}/v1/models").status_code == 200


def _tandem(certificates: Certificates, *arguments: str, key: str | None = KEY) -> subprocess.CompletedProcess[str]:
    """The command line, with the key in its variable, and trusting our authority."""
    environment = {**os.environ, "SSL_CERT_FILE": str(certificates.ca)}
    if key is not None:
        environment["TANDEM_API_KEY"] = key
    return subprocess.run(
        [sys.executable, "-m", "tandem.cli", *arguments],
        env=environment, input="abc\n", capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def test_chat_bench_and_verify_say_what_to_do_without_a_key(secured: Stack, certificates: Certificates) -> None:
    for command in (("chat",), ("bench", "--max-tokens", "4"), ("verify", "--quick")):
        for key in (None, "wrong-0123456789abcdef"):
            refused = _tandem(certificates, *command, "--url", secured.url, key=key)
            assert refused.returncode == 1, refused.stdout
            assert "--api-key or TANDEM_API_KEY" in " ".join(refused.stderr.split())


def test_chat_and_bench_work_with_a_key(secured: Stack, certificates: Certificates, tmp_path: Path) -> None:
    chat = _tandem(certificates, "chat", "--url", secured.url, "--max-tokens", "4")
    assert chat.returncode == 0, chat.stderr
    (tmp_path / "workload.jsonl").write_text('{"prompt": "abc abd abc", "category": "a"}\n')
    figures = tmp_path / "figures.json"
    bench = _tandem(
        certificates, "bench", "--url", secured.url, "--api-key", KEY, "--max-tokens", "8",
        "--workload", str(tmp_path / "workload.jsonl"), "--json", str(figures), key=None,
    )  # fmt: skip
    assert bench.returncode == 0, bench.stdout + bench.stderr
    document = json.loads(figures.read_text())
    assert "gateway" in document["lines"][0]["cpu_seconds_per_1000_tokens"]  # from /metrics, which wants the key too
    assert KEY not in figures.read_text() + bench.stdout + bench.stderr


def _say_the_markers(stack: Stack) -> None:
    """Prompts and keys on every way in, right and wrong."""
    http, completions, chat = stack.client, f"{stack.url}/v1/completions", f"{stack.url}/v1/chat/completions"
    turn = {"role": "user", "content": MARKER}
    stack.complete(prompt=MARKER, max_tokens=20, echo=True, stop=[MARKER], user=MARKER)
    stack.complete(prompt=PROMPT_IDS, max_tokens=20, seed=1, logprobs=2)
    stack.complete(prompt=[MARKER, MARKER], max_tokens=3, n=2, temperature=2.0)
    bodies: list[object] = [
        {"messages": [turn], "max_tokens": 4},
        {"messages": [turn, {"role": MARKER, "content": MARKER}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "text": MARKER}]}]},
        {"prompt": MARKER, MARKER: MARKER},
        {"prompt": [MARKER, 5]},
        {"prompt": MARKER * 1000, "max_tokens": 4},
        {"prompt": PROMPT_IDS, "max_tokens": 10**6},
        {"prompt": [191, 83, 10**6]},
        {"model": MARKER, "prompt": MARKER},
        {"prompt": MARKER, "suffix": MARKER},
        MARKER,
    ]
    for body in bodies:
        for path in (completions, chat):
            http.post(path, json=body)
    http.post(completions, content=f'{{"prompt": "{MARKER}', headers={"content-type": "application/json"})
    http.post(completions, content=MARKER, headers={"content-type": MARKER})
    http.get(f"{stack.url}/{MARKER}?key={KEY}", headers={"x-request-id": f"<{MARKER}>", "cookie": KEY})
    http.post(completions, json={"prompt": MARKER}, headers=_bearer("wrong-" + KEY))
    http.post(completions, json={"prompt": MARKER}, headers={"authorization": f"Basic {KEY}"})
    with http.stream("POST", completions, json={"prompt": MARKER, "max_tokens": 900, "stream": True}) as left:
        next(left.iter_bytes())
    long = {"prompt": PROMPT_IDS, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with http.stream("POST", completions, json=long) as cut:
        lines = cut.iter_lines()
        next(lines)
        stack.draft.kill()
        next(lines)
        stack.target.kill()
        for _ in lines:
            pass


def test_no_log_of_any_service_has_a_prompt_or_a_key_even_at_debug(secured: Stack) -> None:
    """Last in this file, as it ends with both services killed in the middle of an answer."""
    _say_the_markers(secured)
    secured.gateway.stop()
    for service in secured.services:
        log = service.log.read_text()
        assert _events(service), service.module
        assert MARKER not in log
        assert "key-marker" not in log
        assert ", ".join(map(str, PROMPT_IDS[:3])) not in log
    entries = _events(secured.gateway)
    assert {entry["level"] for entry in entries} >= {"debug", "info"}
    assert {entry.get("client") for entry in entries if entry["event"] == "request"} >= {"tester", "other", None}


def _events(service: Service) -> list[dict[str, Any]]:
    """Ours; gRPC's core writes lines of its own, of failed handshakes."""
    return [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
