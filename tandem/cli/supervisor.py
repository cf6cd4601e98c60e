"""Runs the services of one machine: starts them, restarts what may be restarted, and leaves none behind.

The life of a run:

1. All services start at once.
2. A service that is not essential (the draft) is started again when it ends, after a delay that doubles each time.
3. The run ends when it is asked to, or when an essential service (the target, the gateway) ends.
4. The services are stopped stage by stage, the last stage first: the gateway, which lets open answers finish while the
   model services still work, and then these. SIGTERM, a grace period, SIGKILL. A second request to stop skips the rest
   of the grace period.

Should this process itself be killed, the kernel kills the services (see guarded.py).
"""

from __future__ import annotations

import asyncio
import functools
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.cli.child import Child, Service, describe_status


class Output(Protocol):
    """Where the supervisor's own notices and the services' lines go."""

    def line(self, service_name: str, line: str) -> None: ...

    def notice(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays between restarts. A service that lived for `healthy_seconds` begins with the first one again."""

    first_seconds: float = 1.0
    longest_seconds: float = 30.0
    healthy_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An essential service ended by itself."""

    service_name: str
    status: int
    last_lines: tuple[str, ...]


class StopRequest:
    """What Ctrl-C and SIGTERM set: `ask` once to stop, twice to stop at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    def ask(self) -> None:
        if self.asked.is_set():
            self.urgent.set()
        self.asked.set()


class Supervisor:
    """Runs the services of `stages`. Use once."""

    def __init__(
        self, stages: Sequence[Sequence[Service]], output: Output, *, grace_seconds: float, backoff: Backoff
    ) -> None:
        self._stages = stages
        self._output = output
        self._grace_seconds = grace_seconds
        self._backoff = backoff
        self._children: dict[str, Child] = {}

    async def run(self, stop: StopRequest) -> Failure | None:
        """Until `stop` is asked for (None) or an essential service ends. No service runs when it returns or raises."""
        ending = asyncio.Event()  # no more restarts
        keepers = [
            asyncio.create_task(self._keep(service, ending), name=f"keep {service.name}")
            for stage in self._stages
            for service in stage
        ]
        asked = asyncio.create_task(stop.asked.wait())
        try:
            # Keepers of services that are restarted do not end before `ending`: what ends here is fatal.
            done, _ = await asyncio.wait({asked, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            ended = [keeper for keeper in keepers if keeper in done]
            if asked in done or not ended:
                return None
            return ended[0].result()
        finally:
            ending.set()
            asked.cancel()
            for stage in reversed(self._stages):
                await self._stop_stage([self._children[s.name] for s in stage if s.name in self._children], stop)
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, service: Service, ending: asyncio.Event) -> Failure | None:
        """Run `service` until it may not be run again. A Failure when it ended although it is essential."""
        delay = self._backoff.first_seconds
        while True:
            began = time.monotonic()
            child = await Child.start(service, functools.partial(self._output.line, service.name))
            if ending.is_set():  # stopping began during the start, and knows nothing of this one
                child.send(signal.SIGKILL)
                await child.wait()
                return None
            self._children[service.name] = child
            status = await child.wait()
            if ending.is_set():
                return None
            if service.essential:
                return Failure(service.name, status, child.tail)
            if time.monotonic() - began >= self._backoff.healthy_seconds:
                delay = self._backoff.first_seconds
            self._output.notice(
                f"{service.name} stopped ({describe_status(status)}); it is started again in {delay:g} s. "
                "Answers go on without it, by plain decoding"
            )
            if await _is_set_within(ending, delay):
                return None
            delay = min(2 * delay, self._backoff.longest_seconds)

    async def _stop_stage(self, children: Sequence[Child], stop: StopRequest) -> None:
        """End all of them: SIGTERM, the grace period, SIGKILL."""
        for child in children:
            child.send(signal.SIGTERM)
        all_ended = asyncio.create_task(_all_ended(children))
        urgent = asyncio.create_task(stop.urgent.wait())
        await asyncio.wait({all_ended, urgent}, timeout=self._grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        urgent.cancel()
        for child in children:
            child.send(signal.SIGKILL)
        await all_ended


async def _all_ended(children: Sequence[Child]) -> None:
    for child in children:
        await child.wait()


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
