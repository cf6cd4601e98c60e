"""The three real services as child processes on free ports, for tests that need the whole system."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 120.0  # a loaded two-core machine takes 10 s to import torch twice


def free_port() -> int:
    """A port nobody listens on, below those that the kernel hands to outgoing connections: those would race with us."""
    while True:
        port = secrets.randbelow(15_000) + 15_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@dataclass
class Service:
    """One child process: `python -m module` with its settings in the environment."""

    module: str
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **self.environment},
                stdout=log,
                stderr=log,
            )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self, *, timeout_seconds: float = 20.0) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_seconds)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Stack:
    """Target, draft and gateway. `target_model` and `draft_model` are what the services' settings accept."""

    folder: Path
    target_model: str
    draft_model: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target_port, self.draft_port, self.gateway_port = free_port(), free_port(), free_port()
        self.target_metrics_port, self.draft_metrics_port = free_port(), free_port()
        self.gateway_metrics_port = free_port()
        self.url = f"http://127.0.0.1:{self.gateway_port}"
        common = {"TANDEM_LOG_FORMAT": "json", **self.settings}
        self.target = Service(
            "target_service",
            {
                "TANDEM_TARGET_MODEL": self.target_model,
                "TANDEM_TARGET_DTYPE": "float32",
                "TANDEM_TARGET_PORT": str(self.target_port),
                "TANDEM_TARGET_METRICS_PORT": str(self.target_metrics_port),
                **common,
            },
            self.folder / "target.log",
        )
        self.draft = Service(
            "draft_service",
            {
                "TANDEM_DRAFT_MODEL": self.draft_model,
                "TANDEM_DRAFT_DTYPE": "float32",
                "TANDEM_DRAFT_PORT": str(self.draft_port),
                "TANDEM_DRAFT_METRICS_PORT": str(self.draft_metrics_port),
                **common,
            },
            self.folder / "draft.log",
        )
        self.gateway = Service(
            "gateway",
            {
                "TANDEM_GATEWAY_PORT": str(self.gateway_port),
                "TANDEM_GATEWAY_METRICS_PORT": str(self.gateway_metrics_port),
                # Chosen by measured times, it would be another k in each run, and with it the last bits of logits.
                "TANDEM_GATEWAY_NUM_DRAFT_TOKENS": "5",
                "TANDEM_GATEWAY_TARGET_ADDRESSES": f"127.0.0.1:{self.target_port}",
                "TANDEM_GATEWAY_DRAFT_ADDRESSES": f"127.0.0.1:{self.draft_port}",
                **common,
            },
            self.folder / "gateway.log",
        )
        self.services = (self.target, self.draft, self.gateway)
        self.client = httpx.Client(timeout=300.0)

    def __enter__(self) -> Stack:
        try:
            for service in self.services:
                service.start()
            self.wait_until("ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        for service in self.services:
            service.kill()

    def wait_until(self, status: str, *, timeout_seconds: float = START_SECONDS) -> None:
        """Wait until the gateway's readiness says `status`."""
        end = time.monotonic() + timeout_seconds
        seen: object = "nothing"
        while time.monotonic() < end:
            seen = self.readiness()
            if isinstance(seen, dict) and seen.get("status") == status:
                return
            for service in self.services:
                if status == "ready" and service.process is not None and not service.running:
                    raise AssertionError(f"{service.module} ended:\n{service.log.read_text()[-2000:]}")
            time.sleep(0.1)
        logs = "\n".join(f"--- {service.module}\n{service.log.read_text()[-1500:]}" for service in self.services)
        raise AssertionError(f"not {status} within {timeout_seconds:g} s; last answer: {seen}\n{logs}")

    def readiness(self) -> object:
        try:
            return self.client.get(f"{self.url}/health/ready", timeout=5.0).json()
        except (httpx.HTTPError, ValueError) as error:
            return repr(error)

    def complete(self, **body: Any) -> dict[str, Any]:
        """POST /v1/completions; the parsed answer, which must be a 200."""
        response = self.client.post(f"{self.url}/v1/completions", json={"model": "tandem", **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, service: str, name: str) -> float:
        """The sum of a metric's samples at `target`, `draft` or `gateway`."""
        port = {
            "target": self.target_metrics_port,
            "draft": self.draft_metrics_port,
            "gateway": self.gateway_metrics_port,
        }
        text = self.client.get(f"http://127.0.0.1:{port[service]}/metrics", timeout=5.0).text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return sum(float(value) for series, value in rows if series.partition("{")[0] == name)
