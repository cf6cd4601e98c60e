"""A TCP proxy that misbehaves on command, between the gateway and a service, on a thread of its own.

Faults concern the bytes, not the messages: whatever is in flight is delayed, lost or torn apart wherever it happens to
be, as networks do it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

_Result = TypeVar("_Result")

_CHUNK_BYTES = 64 * 1024
_DELAY_SECONDS = 0.05  # of each chunk
_TRICKLE_BYTES, _TRICKLE_SECONDS = 64, 0.002  # 32 kB/s


class Fault(enum.Enum):
    """What happens to bytes."""

    NONE = "none"
    DELAY = "delay"  # each chunk is late
    TRICKLE = "trickle"  # a few at a time
    FREEZE = "freeze"  # none arrives while it lasts; afterwards all do
    DROP = "drop"  # what was sent while it lasts is lost; then the connections are reset, as TCP would in the end


@dataclass
class FaultProxy:
    """Listens on `port` (0: a free one) and passes on to `upstream_port`."""

    upstream_port: int
    port: int = 0
    num_cut: int = 0  # connections that `cut` or a drop ended
    _fault: Fault = Fault.NONE
    _refusing: bool = False
    _pairs: dict[asyncio.StreamWriter, asyncio.StreamWriter] = field(default_factory=dict)  # towards client, service

    def __enter__(self) -> FaultProxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._call(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, fault: Fault) -> None:
        """From now on. After DROP the connections that lost bytes are cut."""
        self._call(lambda: self._change(fault))

    def cut(self) -> int:
        """Reset every connection; how many there were."""
        return self._call(self._cut)

    def refuse(self, *, refusing: bool) -> None:
        """Reset every connection, and each new one at once, until told otherwise."""

        async def change() -> None:
            self._refusing = refusing
            if refusing:
                await self._cut()

        self._call(change)

    def _call(self, what: Callable[[], Awaitable[_Result]]) -> _Result:
        async def run() -> _Result:
            return await what()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=10)

    async def _start(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        await self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _change(self, fault: Fault) -> None:
        dropped = self._fault is Fault.DROP
        self._fault = fault
        if fault is Fault.FREEZE:
            self._flowing.clear()
        else:
            self._flowing.set()
        if dropped:
            await self._cut()

    async def _cut(self) -> int:
        pairs, self._pairs = self._pairs, {}
        for ends in pairs.items():
            for end in ends:
                _reset(end)
        self.num_cut += len(pairs)
        return len(pairs)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _reset(writer)
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:
            _reset(writer)
            return
        self._pairs[writer] = upstream_writer
        both = (
            asyncio.ensure_future(self._pump(reader, upstream_writer)),
            asyncio.ensure_future(self._pump(upstream_reader, writer)),
        )
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.pop(writer, None)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            for end in (writer, upstream_writer):
                end.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(_CHUNK_BYTES):
                await self._flowing.wait()
                if self._fault is Fault.DROP:
                    continue
                if self._fault is Fault.DELAY:
                    await asyncio.sleep(_DELAY_SECONDS)
                step = _TRICKLE_BYTES if self._fault is Fault.TRICKLE else len(chunk)
                for begin in range(0, len(chunk), step):
                    sink.write(chunk[begin : begin + step])
                    await sink.drain()
                    if step < len(chunk):
                        await asyncio.sleep(_TRICKLE_SECONDS)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a machine that crashed and came back would."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
