"""The three real services as child processes on free ports, for tests that need the whole system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.ports import free_port

START_SECONDS = 120.0  # a loaded two-core machine takes 10 s to import torch twice


@dataclass
class Service:
    """One child process: `python -m module` with its settings in the environment."""

    module: str
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None  # from `start` to `kill` or `stop`
    metrics_port: int = 0
    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()  # a command that runs the service's command in its own place

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", self.module],
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
            self.process = None

    def stop(self, *, timeout_seconds: float = 20.0) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(timeout_seconds)
        self.process = None
        return code

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def metric(self, name: str, labels: str = "") -> float:
        """The sum of a metric's samples, or of those whose labels contain `labels`, such as `reason="timeout"`."""
        text = httpx.get(f"http://{self.host}:{self.metrics_port}/metrics", timeout=10.0).text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return sum(float(value) for series, value in rows if series.partition("{")[0] == name and labels in series)


@dataclass
class Stack:
    """Targets, drafts and a gateway. `target_model` and `draft_model` are what the services' settings accept.

    `between` gives the port that the gateway is told in place of a service's own, such as a proxy's. Model services
    listen on `host`, and are started through `prefix`.
    """

    folder: Path
    target_model: str
    draft_model: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    num_targets: int = 1
    num_drafts: int = 1
    target_module: str = "target_service"
    between: Callable[[int], int] = lambda port: port
    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    num_spare_drafts: int = 0  # the last of the drafts: the gateway knows their addresses, the test starts them

    def __post_init__(self) -> None:
        target_ports = [free_port() for _ in range(self.num_targets)]
        draft_ports = [free_port() for _ in range(self.num_drafts)]
        self.gateway_port, self.gateway_metrics_port = free_port(), free_port()
        self.target_port = target_ports[0]
        self.url = f"http://127.0.0.1:{self.gateway_port}"
        common = {"TANDEM_LOG_FORMAT": "json", **self.settings}
        self.targets = [
            self._model_service(self.target_module, "target", self.target_model, port, common) for port in target_ports
        ]
        self.drafts = [
            self._model_service("draft_service", "draft", self.draft_model, port, common) for port in draft_ports
        ]
        self.target, self.target_metrics_port = self.targets[0], self.targets[0].metrics_port
        if self.drafts:  # else the gateway drafts
            self.draft, self.draft_port = self.drafts[0], draft_ports[0]
            self.draft_metrics_port = self.draft.metrics_port
        self.gateway = Service(
            "gateway",
            {
                "TANDEM_GATEWAY_PORT": str(self.gateway_port),
                "TANDEM_GATEWAY_METRICS_PORT": str(self.gateway_metrics_port),
                # Chosen by measured times, it would be another k in each run, and with it the last bits of logits.
                "TANDEM_GATEWAY_NUM_DRAFT_TOKENS": "5",
                "TANDEM_GATEWAY_TARGET_ADDRESSES": ",".join(self._address(port) for port in target_ports),
                "TANDEM_GATEWAY_DRAFT_ADDRESSES": ",".join(self._address(port) for port in draft_ports),
                **common,
            },
            self.folder / "gateway.log",
            metrics_port=self.gateway_metrics_port,
        )
        self.services = (*self.targets, *self.drafts, self.gateway)
        self.spare_drafts = self.drafts[len(self.drafts) - self.num_spare_drafts :]
        self.client = httpx.Client(timeout=300.0)

    def _address(self, port: int) -> str:
        return f"{self.host}:{self.between(port)}"

    def _model_service(self, module: str, role: str, model: str, port: int, common: Mapping[str, str]) -> Service:
        prefix = f"TANDEM_{role.upper()}_"
        metrics_port = free_port()
        # The default, 1 GiB, is written to when a service starts; 64 MiB are 40,000 tokens of a tiny model in float64.
        memory = {} if model in ("", "bundled") else {prefix + "KV_CACHE_BYTES": str(64 << 20)}
        return Service(
            module,
            {
                prefix + "MODEL": model,
                prefix + "DTYPE": "float32",
                prefix + "HOST": self.host,
                prefix + "PORT": str(port),
                prefix + "METRICS_PORT": str(metrics_port),
                **memory,
                **common,
            },
            self.folder / f"{role}-{port}.log",
            metrics_port=metrics_port,
            host=self.host,
            prefix=self.prefix,
        )

    def __enter__(self) -> Stack:
        try:
            for service in self.services:
                if service not in self.spare_drafts:
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
        """Wait until the gateway's readiness says `status`; "ready": and no service that runs is missing."""
        end = time.monotonic() + timeout_seconds
        seen: object = "nothing"
        while time.monotonic() < end:
            seen = self.readiness()
            if isinstance(seen, dict) and seen.get("status") == status:
                not_running = sum(not service.running for service in (*self.targets, *self.drafts))
                if status != "ready" or len(seen["reasons"]) <= not_running:
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
        """The sum of a metric's samples at `target`, `draft` (the first of each) or `gateway`."""
        return {"target": self.target, "draft": self.draft, "gateway": self.gateway}[service].metric(name)
