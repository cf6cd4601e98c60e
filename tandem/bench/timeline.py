"""One answer's stream, taken apart: when its tokens came, how many, and what speculation did. Pure.

The chunks are kept with the time of their arrival while the answer runs and read only when it has ended: parsing in
between would delay the very arrivals that are measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from tandem.cli.sse import read_events
from tandem.errors import TandemError, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The figures of a response's `speculation` object, as docs/api.md defines them; sums, so they can be added."""

    rounds: int
    draftless_rounds: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    network_seconds: float
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrace:
    """One call of the target, as a response's `round_trace` has it. `prefill`: the answer's first."""

    prefill: bool
    drafted: int
    accepted: int
    prepared: bool
    draft_seconds: float
    verify_seconds: float
    network_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One answer. Seconds count from the sending of the request; `last` is the chunk that says how the answer ended."""

    num_prompt_tokens: int
    num_tokens: int  # the end token included
    first_seconds: float  # time to first token
    last_seconds: float
    gap_seconds: tuple[float, ...]  # between neighbouring chunks with text
    text: str
    finish_reason: str
    speculation: Speculation
    rounds: tuple[RoundTrace, ...] = ()  # where the request asked for a trace

    @property
    def seconds_per_token(self) -> float | None:
        """After the first token; None where there is no second one, or both came at once."""
        seconds = self.last_seconds - self.first_seconds
        return seconds / (self.num_tokens - 1) if self.num_tokens > 1 and seconds > 0.0 else None

    @property
    def tokens_per_second(self) -> float:
        """End to end, prefill and waiting included."""
        return self.num_tokens / self.last_seconds


def read_timeline(chunks: Iterable[tuple[float, bytes]]) -> Timeline:
    """The answer in a stream's chunks, each with the second at which it came. Raises TandemError where it broke off."""
    text: list[str] = []
    arrivals: list[float] = []
    finish_reason, last_seconds, ended = "", 0.0, False
    usage: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    for seconds, data in _timed_events(chunks):
        if data == "[DONE]":
            ended = True
            break
        chunk = _parsed(data)
        usage = chunk.get("usage") or usage
        speculation = chunk.get("speculation") or speculation
        for choice in chunk.get("choices") or ():
            if content := (choice.get("delta") or {}).get("content"):
                text.append(content)
                arrivals.append(seconds)
            if choice.get("finish_reason"):
                finish_reason, last_seconds = choice["finish_reason"], seconds
    if not ended or not finish_reason:
        raise Unavailable("the gateway ended the stream before the answer's end: its log says why")
    try:
        return Timeline(
            num_prompt_tokens=int(usage["prompt_tokens"]),
            num_tokens=int(usage["completion_tokens"]),
            first_seconds=arrivals[0] if arrivals else last_seconds,  # an answer may be an end token alone
            last_seconds=last_seconds,
            gap_seconds=tuple(later - earlier for earlier, later in pairwise(arrivals)),
            text="".join(text),
            finish_reason=finish_reason,
            speculation=_figures(speculation),
            rounds=tuple(map(_round, speculation.get("round_trace") or ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(
            f"the answer has no usage or no `speculation` as Tandem reports them ({error!r}): is it the right --url?"
        ) from None


def added(figures: Iterable[Speculation]) -> Speculation:
    """Sums over several answers; positions that one of them does not have count as zero."""
    found = list(figures)
    positions = max((len(each.accepted_per_position) for each in found), default=0)
    per_position = [0] * positions
    for each in found:
        for position, count in enumerate(each.accepted_per_position):
            per_position[position] += count
    sums = {
        field.name: sum(getattr(each, field.name) for each in found)
        for field in fields(Speculation)
        if field.name != "accepted_per_position"
    }
    return Speculation(accepted_per_position=tuple(per_position), **sums)


def _figures(report: Mapping[str, Any]) -> Speculation:
    return Speculation(
        rounds=int(report["rounds"]),
        draftless_rounds=int(report["draftless_rounds"]),
        drafted=int(report["drafted"]),
        accepted=int(report["accepted"]),
        accepted_per_position=tuple(map(int, report["accepted_per_position"])),
        draft_seconds=float(report["draft_seconds"]),
        verify_seconds=float(report["verify_seconds"]),
        network_seconds=float(report["network_seconds"]),
        bytes_sent=int(report["bytes_sent"]),
    )


def _round(entry: Mapping[str, Any]) -> RoundTrace:
    return RoundTrace(
        prefill=bool(entry["prefill"]),
        drafted=int(entry["drafted"]),
        accepted=int(entry["accepted"]),
        prepared=bool(entry["prepared"]),
        draft_seconds=float(entry["draft_seconds"]),
        verify_seconds=float(entry["verify_seconds"]),
        network_seconds=float(entry["network_seconds"]),
    )


def _timed_events(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Events with the time of the chunk that completed them."""
    now = 0.0

    def raw() -> Iterator[bytes]:
        nonlocal now
        for seconds, data in chunks:
            now = seconds
            yield data

    for event in read_events(raw()):
        yield now, event.data


def _parsed(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise Unavailable(f"the stream holds what is no JSON object: {data[:100]!r}")
    if error := chunk.get("error"):
        raise TandemError(f"the answer broke off: {error.get('message') if isinstance(error, dict) else error}")
    return chunk
