"""The supervisor with real processes: small scripts in place of the services."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.cli.child import Child, Service, describe_status
from tandem.cli.supervisor import Backoff, Failure, StopRequest, Supervisor

_QUICK = Backoff(first_seconds=0.05, longest_seconds=0.2, healthy_seconds=60.0)
_GRACE_SECONDS = 20.0

# Says "up PID"; on SIGTERM "term" and, a moment later, "bye".
_SERVE = """
import os, signal, sys, time
def end(*_):
    print("term", flush=True)
    time.sleep(0.2)
    print("bye", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", os.getpid(), flush=True)
while True:
    signal.pause()
"""
_DEAF = _SERVE.replace("signal.signal(signal.SIGTERM, end)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")


class Recorder:
    """An output that keeps everything and lets tests wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.notices: list[str] = []
        self._changed = asyncio.Event()

    def line(self, service_name: str, line: str) -> None:
        self.lines.append((service_name, line))
        self._changed.set()

    def notice(self, text: str) -> None:
        self.notices.append(text)
        self._changed.set()

    def of(self, service_name: str) -> list[str]:
        return [line for name, line in self.lines if name == service_name]

    async def until(self, satisfied: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not satisfied():
                self._changed.clear()
                await self._changed.wait()


def service(name: str, script: str, *, essential: bool = True) -> Service:
    return Service(name=name, command=(sys.executable, "-c", script), environment=os.environ, essential=essential)


def supervisor(
    output: Recorder, *stages: list[Service], grace_seconds: float = _GRACE_SECONDS, backoff: Backoff = _QUICK
) -> Supervisor:
    return Supervisor(stages, output, grace_seconds=grace_seconds, backoff=backoff)


def up(output: Recorder, *names: str) -> Callable[[], bool]:
    return lambda: all(any(line.startswith("up ") for line in output.of(name)) for name in names)


def process_ids(output: Recorder) -> list[int]:
    return [int(line.removeprefix("up ")) for _, line in output.lines if line.startswith("up ")]


def is_gone(process_id: int) -> bool:
    """Whether no such process runs; one that nobody has waited for yet (a zombie) does not run."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


async def test_the_gateway_is_stopped_first_and_the_model_services_once_it_is_gone() -> None:
    output, stop = Recorder(), StopRequest()
    models = [service("target", _SERVE), service("draft", _SERVE, essential=False)]
    running = asyncio.create_task(supervisor(output, models, [service("gateway", _SERVE)]).run(stop))
    await output.until(up(output, "target", "draft", "gateway"))
    stop.ask()
    assert await running is None
    ends = [(name, line) for name, line in output.lines if line in ("term", "bye")]
    assert ends[:2] == [("gateway", "term"), ("gateway", "bye")]
    # Both model services are asked at once; neither waits for the other.
    assert {name for name, line in ends[2:4]} == {"target", "draft"}
    assert [line for _, line in ends[2:]] == ["term", "term", "bye", "bye"]
    assert output.notices == []
    assert all(map(is_gone, process_ids(output)))


async def test_an_essential_service_that_ends_ends_everything() -> None:
    output = Recorder()
    dying = "import sys; print('loading'); print('no memory', file=sys.stderr); sys.exit(3)"
    running = supervisor(output, [service("target", dying)], [service("gateway", _SERVE)])
    failure = await running.run(StopRequest())
    assert isinstance(failure, Failure)
    assert (failure.service_name, failure.status) == ("target", 3)
    assert sorted(failure.last_lines) == ["loading", "no memory"]
    assert all(map(is_gone, process_ids(output)))


async def test_the_draft_is_started_again_and_the_others_do_not_notice() -> None:
    output, stop = Recorder(), StopRequest()
    models = [service("target", _SERVE), service("draft", _SERVE, essential=False)]
    running = asyncio.create_task(supervisor(output, models).run(stop))
    await output.until(up(output, "target", "draft"))
    os.kill(int(output.of("draft")[0].removeprefix("up ")), signal.SIGKILL)
    await output.until(lambda: len(output.of("draft")) == 2)
    assert len(output.of("target")) == 1
    (notice,) = output.notices
    assert "SIGKILL" in notice
    assert "plain decoding" in notice
    stop.ask()
    assert await running is None
    assert all(map(is_gone, process_ids(output)))


async def test_the_delay_between_restarts_doubles_up_to_its_bound() -> None:
    output, stop = Recorder(), StopRequest()
    models = [service("target", _SERVE), service("draft", "raise SystemExit(1)", essential=False)]
    running = asyncio.create_task(supervisor(output, models).run(stop))
    await output.until(lambda: len(output.notices) == 4)
    delays = [re.findall(r"again in ([\d.]+) s", notice)[0] for notice in output.notices]
    assert delays == ["0.05", "0.1", "0.2", "0.2"]
    stop.ask()
    assert await running is None


async def test_a_draft_that_lived_long_enough_is_started_again_without_a_growing_delay() -> None:
    output, stop = Recorder(), StopRequest()
    models = [service("target", _SERVE), service("draft", "raise SystemExit(1)", essential=False)]
    backoff = Backoff(first_seconds=0.05, longest_seconds=10.0, healthy_seconds=0.0)
    running = asyncio.create_task(supervisor(output, models, backoff=backoff).run(stop))
    await output.until(lambda: len(output.notices) == 3)
    assert all("again in 0.05 s" in notice for notice in output.notices)
    stop.ask()
    assert await running is None


async def test_stopping_while_a_restart_is_awaited_starts_nothing_more() -> None:
    output, stop = Recorder(), StopRequest()
    models = [service("target", _SERVE), service("draft", "print('up 0')", essential=False)]
    backoff = Backoff(first_seconds=600.0, longest_seconds=600.0)
    running = asyncio.create_task(supervisor(output, models, backoff=backoff).run(stop))
    await output.until(lambda: len(output.notices) == 1)
    stop.ask()
    async with asyncio.timeout(20):
        assert await running is None
    assert output.of("draft") == ["up 0"]


async def test_stopping_at_the_moment_of_the_start_leaves_nothing_behind() -> None:
    for _ in range(5):
        output, stop = Recorder(), StopRequest()
        running = asyncio.create_task(supervisor(output, [service("target", _SERVE)]).run(stop))
        await asyncio.sleep(0)
        stop.ask()
        async with asyncio.timeout(20):
            assert await running is None
        assert all(map(is_gone, process_ids(output)))


async def test_a_service_deaf_to_sigterm_is_killed_after_the_grace_period() -> None:
    output, stop = Recorder(), StopRequest()
    running = asyncio.create_task(supervisor(output, [service("target", _DEAF)], grace_seconds=0.3).run(stop))
    await output.until(up(output, "target"))
    began = time.monotonic()
    stop.ask()
    assert await running is None
    assert 0.3 <= time.monotonic() - began < 10
    assert all(map(is_gone, process_ids(output)))


async def test_a_second_request_to_stop_skips_the_grace_period() -> None:
    output, stop = Recorder(), StopRequest()
    running = asyncio.create_task(supervisor(output, [service("target", _DEAF)], [service("gateway", _DEAF)]).run(stop))
    await output.until(up(output, "target", "gateway"))
    began = time.monotonic()
    stop.ask()
    stop.ask()
    assert await running is None
    assert time.monotonic() - began < _GRACE_SECONDS / 2
    assert all(map(is_gone, process_ids(output)))


async def test_a_cancelled_run_stops_its_services_too() -> None:
    output = Recorder()
    running = asyncio.create_task(supervisor(output, [service("target", _SERVE)]).run(StopRequest()))
    await output.until(up(output, "target"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert output.of("target")[1:] == ["term", "bye"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_children_are_gone_after_their_parent_was_killed() -> None:
    """Even children that ignore SIGTERM, and although nobody is left to send them anything."""
    parent_script = f"""
import asyncio, os, sys
from tandem.cli.child import Service
from tandem.cli.supervisor import Backoff, StopRequest, Supervisor
class Out:
    def line(self, name, line): print(name, line, flush=True)
    def notice(self, text): print("notice", text, flush=True)
command = (sys.executable, "-c", {_DEAF!r})
services = [Service(name=n, command=command, environment=os.environ, essential=n != "draft")
            for n in ("target", "draft", "gateway")]
asyncio.run(Supervisor([services], Out(), grace_seconds=60, backoff=Backoff()).run(StopRequest()))
"""
    with subprocess.Popen([sys.executable, "-c", parent_script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline().split(" up ")[1]) for _ in range(3)]
        assert not any(map(is_gone, children))
        parent.kill()
    deadline = time.monotonic() + 10
    while not all(map(is_gone, children)):
        assert time.monotonic() < deadline, "a child outlived its parent"
        time.sleep(0.02)


async def test_ctrl_c_at_the_terminal_reaches_children_only_through_the_parent() -> None:
    """Else the model services would end before the gateway has finished its answers."""
    output, stop = Recorder(), StopRequest()
    running = asyncio.create_task(supervisor(output, [service("target", _SERVE)]).run(stop))
    await output.until(up(output, "target"))
    (child,) = process_ids(output)
    assert os.getpgid(child) == child != os.getpgid(0)
    stop.ask()
    assert await running is None


async def test_long_lines_split_characters_and_missing_line_ends_lose_nothing() -> None:
    lines: list[str] = []
    script = (
        "import sys; w = sys.stdout.buffer; w.write('ä'.encode()[:1]); w.flush();"
        "w.write('ä'.encode()[1:] + b'\\r\\n');"
        "w.write(b'x' * 200_000 + b'\\n\\xff\\nend')"
    )
    child = await Child.start(service("target", script), lines.append)
    assert await child.wait() == 0
    assert lines[0] == "ä"
    assert "".join(lines[1:-2]) == "x" * 200_000
    assert lines[-2:] == ["\ufffd", "end"]
    assert child.tail[-2:] == ("\ufffd", "end")
    assert not child.running


async def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_end_up() -> None:
    script = (
        "import subprocess, sys; print('started', flush=True);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)'])"
    )
    child = await Child.start(service("target", script), lambda _line: None)
    async with asyncio.timeout(4):
        assert await child.wait() == 0
    assert child.tail == ("started",)


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit status 0"), (2, "exit status 2"), (-9, "ended by SIGKILL"), (-99, "ended by signal 99")],
)
def test_a_status_is_told_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words
