"""`tandem bench --up`: the services of `tandem up` for the time of one measurement, on ports that were free."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from rich.console import Console

from tandem.cli.child import describe_status
from tandem.cli.plan import UpOptions, plan_services
from tandem.cli.readiness import ReadinessProbe
from tandem.cli.supervisor import Backoff, Failure, StopRequest, Supervisor
from tandem.cli.up_view import UpView
from tandem.errors import Unavailable

_KILL_MARGIN_SECONDS: Final = 10.0  # for what the services do after their own grace period
_GRACE_SECONDS: Final = 1.0  # no answer is open when the measurement is over
_DRAFT_SECONDS: Final = 120.0  # a figure without the draft would be worth nothing: it is waited for
_SHOWN_LINES: Final = 5

T = TypeVar("T")


class _Quiet(UpView):
    """Shows what it waits for and what goes wrong, not the services' lines."""

    def line(self, service_name: str, line: str) -> None:
        pass


def on_free_ports(options: UpOptions) -> UpOptions:
    """`options` with ports that nobody uses, so that a run disturbs no other services."""
    with contextlib.ExitStack() as held:  # all at once, so that they differ
        sockets = [held.enter_context(socket.create_server((options.host, 0))) for _ in range(5)]
        gateway, target, draft, target_metrics, draft_metrics = (int(each.getsockname()[1]) for each in sockets)
    return replace(
        options,
        port=gateway,
        target_port=target,
        draft_port=draft,
        target_metrics_port=target_metrics,
        draft_metrics_port=draft_metrics,
        grace_seconds=_GRACE_SECONDS,
    )


def metrics_pages(options: UpOptions) -> dict[str, str]:
    """Of the model services, by name."""
    ports = {"target": options.target_metrics_port}
    if options.has_draft_service:
        ports["draft"] = options.draft_metrics_port
    return {name: f"http://127.0.0.1:{port}/metrics" for name, port in ports.items()}


def started_with(up: UpOptions) -> dict[str, Any]:
    """What --up decided; the rest is the services' own defaults and variables."""
    chosen = {
        "model": up.model,
        "draft": up.drafting_model or "n-grams",
        "draft layers": up.draft_layers,
        "draft table": up.drafting_table,
        "draft head": up.draft_head,
        "threads of the target": up.target_threads,
    }
    return {name: value for name, value in chosen.items() if value is not None}


async def with_services(
    options: UpOptions, environment: Mapping[str, str], console: Console, work: Callable[[], Awaitable[T]]
) -> T:
    """What `work` returns, done while the services run. They have ended when this returns or raises.

    Raises Unavailable where they do not come up. A service that ends later is told, and `work` meets failing requests.
    """
    view, stop = _Quiet(console), StopRequest()
    supervisor = Supervisor(
        plan_services(options, environment),
        view,
        grace_seconds=options.grace_seconds + _KILL_MARGIN_SECONDS,
        backoff=Backoff(),
    )
    running = asyncio.create_task(supervisor.run(stop), name="services")
    waiting = asyncio.create_task(_until_ready(options, view), name="wait for the services")
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            raise Unavailable(_words(running.result()))
        await waiting
        result = await work()
        if running.done():
            view.notice(_words(running.result()))
        return result
    finally:
        waiting.cancel()
        stop.ask()
        await asyncio.gather(waiting, running, return_exceptions=True)


async def _until_ready(options: UpOptions, view: UpView) -> None:
    """Until target and draft serve; after a while, without the draft, which the gateway then reports."""
    probe = ReadinessProbe(options.url)
    with view.waiting(options) as show:
        await probe.wait_until(lambda answer: answer.serving, show=show)
        await probe.wait_until(lambda answer: answer.status == "ready", show=show, limit_seconds=_DRAFT_SECONDS)


def _words(failure: Failure | None) -> str:
    if failure is None:
        return "the services were stopped"
    last = "\n  ".join(failure.last_lines[-_SHOWN_LINES:])
    return f"{failure.service_name} stopped ({describe_status(failure.status)}); its last lines:\n  {last}"
