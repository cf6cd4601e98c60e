"""Server-sent events out of a byte stream, as the HTML standard says (section "Interpreting an event stream").

Not by splitting text into lines: Python also splits at characters, such as U+2028, that JSON leaves as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One dispatched event."""

    data: str
    event: str = "message"


def read_events(chunks: Iterable[bytes]) -> Iterator[ServerSentEvent]:
    """The events in `chunks`, which may break anywhere, each as soon as its blank line is there.

    Comments are passed over, and so is an event that the stream ends in the middle of.
    """
    data: list[str] = []
    event = ""
    for line in _lines(chunks):
        if not line:
            if data:
                yield ServerSentEvent("\n".join(data), event or "message")
            data, event = [], ""
            continue
        name, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            event = value


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Complete lines without their ends. A CR ends a line at once: the LF that may follow belongs to it."""
    pending = b""
    after_cr = False
    at_start = True
    for chunk in chunks:
        if not chunk:
            continue
        fresh = chunk.removeprefix(b"\n") if after_cr else chunk
        after_cr = chunk.endswith(b"\r")
        *complete, pending = _LINE_END.split(pending + fresh)
        for line in complete:
            yield line.removeprefix(_BYTE_ORDER_MARK) if at_start else line
            at_start = False
