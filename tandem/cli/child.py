"""One child process: its output line by line, its end, its signals."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.cli.guarded import guarded_command

_READ_BYTES = 1 << 16
_MAX_LINE_CHARS = 1 << 16
_TAIL_LINES = 20
# The pipe of an ended process ends at once, unless a process that it started holds the other end.
_DRAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A process to run. When an `essential` one ends, everything ends; another is started again."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    essential: bool = True


class Child:
    """A started process. It leads a process group of its own, so that Ctrl-C reaches it only through its parent."""

    def __init__(
        self, process: asyncio.subprocess.Process, output: asyncio.StreamReader, on_line: Callable[[str], None]
    ) -> None:
        self._process = process
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reading = asyncio.create_task(self._read(output), name=f"read {process.pid}")

    @classmethod
    async def start(cls, service: Service, on_line: Callable[[str], None]) -> Child:
        """Start `service`; every line it writes, on either stream, goes to `on_line`.

        Must run on the main thread: the child is killed when the thread that started it ends (see guarded.py).
        """
        # A pipe of ours: asyncio's own stays open for as long as any descendant of the process holds its other end.
        read_end, write_end = os.pipe()
        output = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb", buffering=0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *guarded_command(service.command, parent_pid=os.getpid()),
                env=dict(service.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            transport.close()
            raise
        finally:
            os.close(write_end)
        child = cls(process, output, on_line)
        child._reading.add_done_callback(lambda _: transport.close())
        return child

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines it wrote."""
        return tuple(self._tail)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.running:
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit status (-N: ended by signal N), once it has ended and its last line was handed on."""
        status = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=_DRAIN_SECONDS)
        self._reading.cancel()
        return status

    async def _read(self, output: asyncio.StreamReader) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        partial = ""
        while chunk := await output.read(_READ_BYTES):
            *complete, partial = (partial + decoder.decode(chunk)).split("\n")
            for line in complete:
                self._take(line)
            if len(partial) > _MAX_LINE_CHARS:
                self._take(partial)
                partial = ""
        if partial:
            self._take(partial)

    def _take(self, line: str) -> None:
        line = line.rstrip("\r")
        self._tail.append(line)
        self._on_line(line)


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"
