"""What `tandem up` runs: two or three command lines, their environments, and the ports they need. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.cli.child import Service
from tandem.cli.ports import PortUse
from tandem.models.bundled import BUNDLED, BUNDLED_DRAFT

_LOOPBACK = "127.0.0.1"  # the model services speak to the gateway only
_ANY_ADDRESS: Mapping[str, str] = {"0.0.0.0": _LOOPBACK, "::": "::1"}  # noqa: S104  (compared with, not bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the user chose. None: the services decide, or the variables they read (TANDEM_TARGET_DTYPE and so on)."""

    model: str = BUNDLED
    draft_model: str | None = None
    draft_layers: int | None = None
    draft_table: str | None = None  # None: the bundled one, where that fits
    draft_head: str | None = None
    draft: bool = True
    device: str | None = None
    draft_device: str | None = None
    dtype: str | None = None
    threads: int | None = None  # of each model service; None: what `cores` there are, divided between them
    cores: int = 1
    host: str = _LOOPBACK
    port: int = 8000
    target_port: int = 50051
    draft_port: int = 50052
    target_metrics_port: int = 9101
    draft_metrics_port: int = 9102
    grace_seconds: float = 10.0
    tls: bool = False  # the gateway has a certificate: its variables say so
    asks_for_key: bool = False  # and so they do of a file with keys

    @property
    def drafting_model(self) -> str:
        """The model behind the draft service; empty: n-grams only. A draft by layers is a part of the target."""
        return self.draft_model or (self.model if self.draft_layers else "")

    @property
    def has_draft_service(self) -> bool:
        """Whether a model drafts, which takes a service of its own. The gateway looks n-grams up itself."""
        return self.draft and bool(self.drafting_model)

    @property
    def drafting_table(self) -> str:
        """The table of n-grams; the bundled target has one, for where no model drafts."""
        if self.draft_table is not None:
            return self.draft_table
        return BUNDLED if self.model == BUNDLED and not self.drafting_model else "none"

    @property
    def target_threads(self) -> int:
        """All cores where no model drafts: n-grams take microseconds. Else half: two must not share a core."""
        if self.threads is not None:
            return self.threads
        return max(1, self.cores // 2) if self.has_draft_service else max(1, self.cores)

    @property
    def draft_threads(self) -> int:
        """The other half."""
        return self.threads if self.threads is not None else max(1, self.cores // 2)

    @property
    def draft_shares_device(self) -> bool:
        """Whether target and draft are known to compute on the same cores or GPU, or to leave none to the gateway, so
        that there is no spare time to prepare drafts in (two cores: 0.92 to 1.01 times as fast with, decision 10)."""
        device = self.draft_device or self.device
        if device is not None and device.startswith("cuda"):
            return device == self.device
        return self.threads is None and self.cores < 3

    @property
    def url(self) -> str:
        """Where this machine reaches the gateway."""
        host = _ANY_ADDRESS.get(self.host, self.host)
        scheme = "https" if self.tls else "http"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def reached_by_others(self) -> bool:
        """Whether other machines can connect to the gateway."""
        return self.host in _ANY_ADDRESS

    @property
    def bundled_model_used(self) -> bool:
        return self.model == BUNDLED or (self.has_draft_service and self.drafting_model in (BUNDLED, BUNDLED_DRAFT))


def plan_services(options: UpOptions, environment: Mapping[str, str]) -> list[list[Service]]:
    """The services in stages: the model services, and the gateway, which is stopped before them."""
    grace = f"{options.grace_seconds:g}"
    # The user's own word counts more.
    prepares = "TANDEM_DRAFT_PREPARED_BRANCHES" in environment or not options.draft_shares_device
    target = Service(
        name="target",
        command=_python("target_service"),
        environment=_with(
            environment,
            _model_process(options.target_threads),
            TANDEM_LOG_FORMAT="json",
            TANDEM_TARGET_HOST=_LOOPBACK,
            TANDEM_TARGET_PORT=str(options.target_port),
            TANDEM_TARGET_METRICS_PORT=str(options.target_metrics_port),
            TANDEM_TARGET_MODEL=options.model,
            TANDEM_TARGET_DRAFT_HEAD=options.draft_head,
            TANDEM_TARGET_DEVICE=options.device,
            TANDEM_TARGET_DTYPE=options.dtype,
            TANDEM_TARGET_THREADS=str(options.target_threads),
            TANDEM_TARGET_SHUTDOWN_GRACE_SECONDS=grace,
        ),
    )
    draft = Service(
        name="draft",
        command=_python("draft_service"),
        environment=_with(
            environment,
            _model_process(options.draft_threads),
            TANDEM_LOG_FORMAT="json",
            TANDEM_DRAFT_HOST=_LOOPBACK,
            TANDEM_DRAFT_PORT=str(options.draft_port),
            TANDEM_DRAFT_METRICS_PORT=str(options.draft_metrics_port),
            TANDEM_DRAFT_MODEL=options.drafting_model,
            TANDEM_DRAFT_TABLE=options.drafting_table,
            TANDEM_DRAFT_NUM_LAYERS=None if options.draft_layers is None else str(options.draft_layers),
            TANDEM_DRAFT_DEVICE=options.draft_device or options.device,
            TANDEM_DRAFT_DTYPE=options.dtype,
            TANDEM_DRAFT_THREADS=str(options.draft_threads),
            TANDEM_DRAFT_PREPARED_BRANCHES=None if prepares else "0",
            TANDEM_DRAFT_SHUTDOWN_GRACE_SECONDS=grace,
        ),
        essential=False,
    )
    gateway = Service(
        name="gateway",
        command=_python("gateway"),
        environment=_with(
            environment,
            {},
            TANDEM_LOG_FORMAT="json",
            TANDEM_GATEWAY_HOST=options.host,
            TANDEM_GATEWAY_PORT=str(options.port),
            TANDEM_GATEWAY_TARGET_ADDRESSES=f"{_LOOPBACK}:{options.target_port}",
            TANDEM_GATEWAY_DRAFT_ADDRESSES=f"{_LOOPBACK}:{options.draft_port}" if options.has_draft_service else "",
            TANDEM_GATEWAY_LOOKUP=None if options.draft else "false",
            TANDEM_GATEWAY_TABLE=options.draft_table,
            TANDEM_GATEWAY_SHUTDOWN_GRACE_SECONDS=grace,
        ),
    )
    return [[target, draft] if options.has_draft_service else [target], [gateway]]


def plan_ports(options: UpOptions) -> list[PortUse]:
    """Every address that will be listened on."""
    uses = [
        PortUse(
            host=options.host, port=options.port, purpose="the gateway", port_option="--port", host_option="--host"
        ),
        PortUse(host=_LOOPBACK, port=options.target_port, purpose="the target", port_option="--target-port"),
        PortUse(
            host=_LOOPBACK,
            port=options.target_metrics_port,
            purpose="the target's metrics",
            port_option="--target-metrics-port",
        ),
    ]
    if options.has_draft_service:
        uses += [
            PortUse(host=_LOOPBACK, port=options.draft_port, purpose="the draft", port_option="--draft-port"),
            PortUse(
                host=_LOOPBACK,
                port=options.draft_metrics_port,
                purpose="the draft's metrics",
                port_option="--draft-metrics-port",
            ),
        ]
    return uses


def _python(module: str) -> tuple[str, ...]:
    # -P: a folder named `gateway` where the user happens to be is not ours.
    return (sys.executable, "-P", "-m", module)


def _model_process(threads: int) -> dict[str, str]:
    """Two model processes on one machine must not fight for the same cores."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def _with(environment: Mapping[str, str], more: Mapping[str, str], **variables: str | None) -> dict[str, str]:
    """`environment` and the given variables; None leaves a variable as the environment has it."""
    chosen = {name: value for name, value in variables.items() if value is not None}
    return {**environment, **more, **chosen}
