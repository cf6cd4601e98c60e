"""A peer's process: started in a group of its own, its words kept, and never left behind."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx

from benchmarks.peers.peer import PeerFailed
from tandem.cli.guarded import guarded_command

REPOSITORY = Path(__file__).parents[2]

_TAIL_BYTES = 1500
_POLL_SECONDS = 0.1


class Process:
    """A running command. It inherits the cores that the benchmark is bound to, and ends with it, however it ends.

    Both its streams go to a file, except standard output where it is `piped`. Start it from the main thread.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, piped: bool = False
    ) -> None:
        if shutil.which(command[0]) is None:
            raise PeerFailed(f"cannot run {command[0]}: there is no such program")
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `end`)
        self.popen = subprocess.Popen(
            guarded_command(command, parent_pid=os.getpid()),
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else self._log,
            stderr=self._log,
            start_new_session=True,
        )
        atexit.register(self.end, grace_seconds=0.0)

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def last_words(self) -> str:
        """The end of what it wrote, on one line."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        content = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = content.decode(errors="replace").split("\n")
        return " / ".join(line.strip() for line in lines[-4:] if line.strip())

    def end(self, *, grace_seconds: float = 10.0) -> None:
        """SIGTERM, the grace period, SIGKILL for the whole group."""
        atexit.unregister(self.end)
        if self.running and grace_seconds:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace_seconds)
        self._signal(signal.SIGKILL)
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was not sent yet
                    stream.close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
            os.killpg(self.popen.pid, number)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def wait_for_http(
    process: Process,
    url: str,
    *,
    timeout_seconds: float,
    satisfied: Callable[[httpx.Response], bool] = lambda _: True,
) -> None:
    """Until `url` answers with 200, and satisfies. Raises PeerFailed when the process ends first, or time does."""
    deadline = time.monotonic() + timeout_seconds
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < deadline:
            if not process.running:
                raise PeerFailed(f"ended with status {process.popen.returncode}: {process.last_words()}")
            with contextlib.suppress(httpx.HTTPError):
                response = client.get(url)
                if response.status_code == 200 and satisfied(response):
                    return
            time.sleep(_POLL_SECONDS)
    raise PeerFailed(f"not ready after {timeout_seconds:.0f} s: {process.last_words()}")
