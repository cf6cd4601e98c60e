"""Tandem itself, as a user runs it: `tandem up` with its three services, and the gateway's HTTP interface."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping

from benchmarks.peers.openai_server import complete
from benchmarks.peers.peer import Prompt, Result, Setting
from benchmarks.peers.process import Process, free_ports, wait_for_http
from benchmarks.peers.streaming import StreamClient
from tandem import __version__

_PORT_OPTIONS = ("--port", "--target-port", "--draft-port", "--target-metrics-port", "--draft-metrics-port")


class TandemUp:
    """Settings: `threads`, of each model service; `arguments`, more words for `tandem up`; `environment`, variables
    for its services; `speculation`, the request's object."""

    settle_seconds = 0.3

    def __init__(self) -> None:
        self._process: Process | None = None
        self._client: StreamClient | None = None
        self._state: tempfile.TemporaryDirectory[str] | None = None
        self._speculation: dict[str, object] = {}

    @property
    def versions(self) -> Mapping[str, str]:
        return {"tandem": __version__}

    def start(self, setting: Setting, *, timeout_seconds: float) -> None:
        self._speculation = dict(setting["speculation"])
        ports = free_ports(len(_PORT_OPTIONS))
        command = [sys.executable, "-P", "-m", "tandem.cli", "up", "--threads", str(setting["threads"]), "--grace", "1"]
        for option, port in zip(_PORT_OPTIONS, ports, strict=True):
            command += [option, str(port)]
        command += setting.get("arguments", ())
        self._state = tempfile.TemporaryDirectory()  # a `tandem down` meant for others does not find it
        self._process = Process(
            command, environment={"XDG_STATE_HOME": self._state.name, **setting.get("environment", {})}
        )
        url = f"http://127.0.0.1:{ports[0]}"
        wanted = ("ready", "degraded") if "--no-draft" in command else ("ready",)
        wait_for_http(
            self._process,
            f"{url}/health/ready",
            timeout_seconds=timeout_seconds,
            satisfied=lambda response: response.json()["status"] in wanted,
        )
        self._client = StreamClient(url)

    def generate(self, prompt: Prompt, *, max_tokens: int, timeout_seconds: float) -> Result:
        assert self._client is not None, "not started"
        return complete(
            self._client,
            prompt,
            more={"model": "tandem", "add_special_tokens": False, "speculation": self._speculation},
            max_tokens=max_tokens,
            timeout_seconds=timeout_seconds,
        )

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.end(grace_seconds=30.0)
        if self._state is not None:
            self._state.cleanup()
        self._client = self._process = self._state = None
