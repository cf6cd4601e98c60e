"""What a stack holds: sessions, blocks, places, tasks, file descriptors, memory. For tests that nothing leaks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tests.stack import Service, Stack

_LEAST_BYTES = 32 << 20  # allocators keep so much as they like


@dataclass(frozen=True)
class Base:
    """What an idle gateway has. Take it after a few requests: the first ones load what then stays."""

    num_tasks: float
    num_descriptors: int
    resident_bytes: int


def base_of(stack: Stack) -> Base:
    return Base(stack.gateway.metric("tandem_tasks"), _descriptors(stack.gateway), _resident_bytes(stack.gateway))


def held(stack: Stack) -> dict[str, float]:
    """All that must be zero when nobody asks for anything."""
    names = ("tandem_requests_running", "tandem_requests_waiting", "tandem_kv_promised_tokens")
    places = {name: stack.gateway.metric(name) for name in names}
    return places | {
        f"{service.log.stem} {name}": service.metric(name)
        for service in (*stack.targets, *stack.drafts)
        for name in ("tandem_sessions_open", "tandem_kv_blocks_held", "tandem_programs_waiting")
    }


def check_nothing_leaked(stack: Stack, base: Base, *, within_seconds: float = 20.0, growth: float = 0.25) -> None:
    """Everything is at its base, or gets there in time; memory may have grown by that share of it."""
    end = time.monotonic() + within_seconds
    while True:
        kept, now = held(stack), base_of(stack)
        if not any(kept.values()) and now.num_tasks <= base.num_tasks and now.num_descriptors <= base.num_descriptors:
            break
        assert time.monotonic() < end, (kept, base, now)
        time.sleep(0.1)
    assert now.resident_bytes <= base.resident_bytes * (1.0 + growth) + _LEAST_BYTES, (base, now)


def _descriptors(service: Service) -> int:
    assert service.process is not None
    return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))


def _resident_bytes(service: Service) -> int:
    assert service.process is not None
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
