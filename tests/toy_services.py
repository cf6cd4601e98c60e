"""Real servicers on real gRPC servers over toy models, as many as wanted, and a fleet that knows them, in this loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc

from draft_service.drafters.base import Drafter
from draft_service.drafters.model import ModelDrafter
from draft_service.servicer import DraftServicer
from gateway.failover import FailoverReason
from gateway.fleet import Fleet
from gateway.grpc_backends import Deadlines
from tandem.engine.pulse import ModelPulse
from tandem.rpc.sessions import SessionSlots
from tandem.service_metrics import ServiceMetrics
from tandem.types import DraftInfo, DraftlessReason, ModelInfo, TargetInfo
from tandem.v1 import draft_pb2_grpc, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier
from tests.fakes import tokenizer_files
from tests.toy_models import ToyModel, ToyRunner, working

MODEL = ToyModel(vocab_size=266, seed=1)
DRAFT = MODEL.like(weight=0.9, seed=2)
INFO = ModelInfo(
    model_id="toy",
    revision="1",
    vocab_size=266,
    tokenizer_fingerprint="t",
    context_length=8192,
    device="cpu",
    dtype="float32",
    engine="toy",
)
DEADLINES = Deadlines(
    request_seconds=60,
    first_seconds=10,
    verify_seconds=10,
    draft_first_seconds=10,
    draft_seconds=10,
    draft_retry_seconds=0.5,
)


@dataclass
class ToyService:
    """One service. `hang` stops its model between two steps; what needs no model is answered all the same."""

    runner: ToyRunner
    metrics: ServiceMetrics
    port: int
    stop: Callable[[], Awaitable[None]]
    health: list[bool] = field(default_factory=list)  # changes, where its model is watched

    @property
    def num_sessions(self) -> int:
        return int(self.metrics.registry.get_sample_value("tandem_sessions_open") or 0)

    def hang(self) -> None:
        self.runner.gate = threading.Semaphore(0)

    def go_on(self) -> None:
        gate, self.runner.gate = self.runner.gate, None
        if gate is not None:
            gate.release()


@dataclass
class ToyFleet:
    fleet: Fleet
    targets: Sequence[ToyService]
    drafts: Sequence[ToyService]
    failovers: list[FailoverReason]
    draft_faults: list[DraftlessReason]


@asynccontextmanager
async def toy_fleet(
    *,
    num_targets: int = 1,
    num_drafts: int = 1,
    between: Callable[[int], int] = lambda port: port,
    deadlines: Deadlines = DEADLINES,
    infos: Sequence[TargetInfo] | None = None,
    step_seconds: float = 0.0,
    wait_for: str = "ready",
    probe_timeout_seconds: float = 5.0,
    failover_seconds: float = 5.0,
    stall_seconds: float | None = None,
) -> AsyncIterator[ToyFleet]:
    """`between`: the port that the fleet is told in place of a service's own. `infos`: what each target says it is.
    `stall_seconds`: after which a model that does not compute is found out; None: never."""
    failovers: list[FailoverReason] = []
    draft_faults: list[DraftlessReason] = []
    targets, drafts = [], []
    watching: list[asyncio.Task[None]] = []
    served = TargetInfo(model=INFO, end_token_ids=(265,), max_sessions=64)
    with ExitStack() as stack:
        for number in range(num_targets):
            runner = ToyRunner(MODEL, num_blocks=512, step_seconds=step_seconds)
            worker = stack.enter_context(working(runner))
            metrics = ServiceMetrics()
            pulse = None if stall_seconds is None else ModelPulse(worker, stall_seconds=stall_seconds)
            target = TargetServicer(
                info=served if infos is None else infos[number],
                tokenizer_files=tokenizer_files(),
                verifier=Verifier(worker),
                slots=SessionSlots(max_sessions=64, metrics=metrics),
                check=(lambda: None) if pulse is None else pulse.check,
            )
            server = grpc.aio.server()
            target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
            targets.append(await _started(server, runner, metrics))
            if pulse is not None:
                watching.append(await _watched(pulse, targets[-1]))
        for _ in range(num_drafts):
            runner = ToyRunner(DRAFT, num_blocks=512)
            worker = stack.enter_context(working(runner))
            metrics = ServiceMetrics()
            pulse = None if stall_seconds is None else ModelPulse(worker, stall_seconds=stall_seconds)
            drafters: dict[str, Drafter] = {"model": ModelDrafter(worker, law_size=50)}
            draft = DraftServicer(
                info=DraftInfo(
                    model=replace(INFO, model_id="toy-draft"),
                    drafters=("model",),
                    default_drafter="model",
                    max_draft_tokens=16,
                    max_sessions=64,
                ),
                drafters=drafters,
                slots=SessionSlots(max_sessions=64, metrics=metrics),
                check=(lambda: None) if pulse is None else pulse.check,
            )
            server = grpc.aio.server()
            draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
            drafts.append(await _started(server, runner, metrics))
            if pulse is not None:
                watching.append(await _watched(pulse, drafts[-1]))
        fleet = Fleet(
            targets=[f"127.0.0.1:{between(service.port)}" for service in targets],
            drafts=[f"127.0.0.1:{between(service.port)}" for service in drafts],
            deadlines=deadlines,
            probe_interval_seconds=0.2,
            probe_timeout_seconds=probe_timeout_seconds,
            failover_seconds=failover_seconds,
            observe_failover=failovers.append,
            observe_draft_fault=draft_faults.append,
        )
        await fleet.start()
        try:
            async with asyncio.timeout(10):
                while not _is(fleet, wait_for, all_up=infos is None):  # noqa: ASYNC110 - peers have no event to wait for
                    await asyncio.sleep(0.01)
            yield ToyFleet(fleet, targets, drafts, failovers, draft_faults)
        finally:
            await fleet.close()
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            for service in (*targets, *drafts):
                service.go_on()
                await service.stop()


def _is(fleet: Fleet, status: str, *, all_up: bool) -> bool:
    state = fleet.readiness()
    missing = [reason for reason in state.reasons if "no draft service is configured" not in reason]
    return state.status == status and not (all_up and missing)


async def _watched(pulse: ModelPulse, service: ToyService) -> asyncio.Task[None]:
    async def note(fault: str | None) -> None:
        service.health.append(fault is None)

    await pulse.first()
    return asyncio.create_task(pulse.watch(note))


async def _started(server: grpc.aio.Server, runner: ToyRunner, metrics: ServiceMetrics) -> ToyService:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return ToyService(runner, metrics, port, lambda: server.stop(None))
