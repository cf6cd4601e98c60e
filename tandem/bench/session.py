"""Runs a plan: every group in every arm, timed, with the processes' use around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tandem.bench.arms import Arm
from tandem.bench.client import BenchClient
from tandem.bench.plan import Group, Sampling, with_ticket
from tandem.bench.processes import Processes, used
from tandem.bench.timeline import Timeline
from tandem.bench.workload import Message, Prompt
from tandem.errors import TandemError

CLIENT: Final = "bench"  # this process, among those that use the machine
_MAX_FAILURES: Final = 20  # something is wrong then that more requests will not mend


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One request of one arm. The same prompt, turn and repeat in another arm is its pair."""

    arm: str
    group: int
    concurrency: int
    category: str
    prompt: str
    turn: int
    repeat: int
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """One group in one arm, from the first request sent to the last answer's end. `complete`: none failed."""

    arm: str
    group: int
    concurrency: int
    category: str
    seconds: float
    num_tokens: int
    complete: bool
    cpu_seconds: Mapping[str, float]  # by process
    resident_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request without an answer."""

    arm: str
    concurrency: int
    prompt: str
    message: str


@dataclass(slots=True, kw_only=True)
class Records:
    """What a run has seen. `stopped` says why it ended before its plan did; empty: it did not."""

    num_groups: int
    num_groups_done: int = 0
    observations: list[Observation] = field(default_factory=list)
    runs: list[GroupRun] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    stopped: str = ""


class Session:
    """One run against one gateway. `tickets` are the lines that prompts begin with; None: they begin as they are."""

    def __init__(
        self, client: BenchClient, processes: Processes, sampling: Sampling, *, tickets: Iterator[str] | None
    ) -> None:
        self._client = client
        self._processes = processes
        self._sampling = sampling
        self._tickets = tickets

    async def warm_up(self, groups: Sequence[Group], *, done: Callable[[], None]) -> None:
        """The same as `measure`, and nothing kept. Raises TandemError at the first failure: an arm may be refused."""
        for group in groups:
            for arm in group.arms:
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(self._conversation(prompt, arm, done)) for prompt in group.prompts]
                for _, error in (task.result() for task in asked):
                    if error is not None:
                        raise type(error)(f"arm {arm.name}: {error.message}") from error

    async def measure(
        self, groups: Sequence[Group], *, in_time: Callable[[], bool], done: Callable[[], None]
    ) -> Records:
        """Every group in every arm; no new one once `in_time` is false. `done` is called for each conversation."""
        records = Records(num_groups=len(groups))
        for group in groups:
            if not in_time():
                records.stopped = "the time was up"
            elif len(records.failures) >= _MAX_FAILURES:
                records.stopped = f"{len(records.failures)} requests had failed"
            if records.stopped:
                break
            for arm in group.arms:
                await self._run(group, arm, records, done)
            records.num_groups_done += 1
        return records

    async def _run(self, group: Group, arm: Arm, records: Records, done: Callable[[], None]) -> None:
        before, own_before = await self._processes.figures(), time.process_time()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._conversation(prompt, arm, done)) for prompt in group.prompts]
        seconds = time.perf_counter() - began
        own_seconds = time.process_time() - own_before
        after = await self._processes.figures()
        num_tokens, num_failed = 0, 0
        for prompt, task in zip(group.prompts, asked, strict=True):
            timelines, error = task.result()
            num_tokens += sum(timeline.num_tokens for timeline in timelines)
            records.observations += [
                Observation(
                    arm=arm.name,
                    group=group.index,
                    concurrency=group.concurrency,
                    category=group.category,
                    prompt=prompt.name,
                    turn=turn,
                    repeat=group.repeat,
                    timeline=timeline,
                )
                for turn, timeline in enumerate(timelines)
            ]
            if error is not None:
                num_failed += 1
                records.failures.append(
                    Failure(arm=arm.name, concurrency=group.concurrency, prompt=prompt.name, message=error.message)
                )
        records.runs.append(
            GroupRun(
                arm=arm.name,
                group=group.index,
                concurrency=group.concurrency,
                category=group.category,
                seconds=seconds,
                num_tokens=num_tokens,
                complete=not num_failed,
                cpu_seconds={**used(before, after), CLIENT: own_seconds},
                resident_bytes={n: f.resident_bytes for n, f in after.items() if f.resident_bytes is not None},
            )
        )

    async def _conversation(
        self, prompt: Prompt, arm: Arm, done: Callable[[], None]
    ) -> tuple[list[Timeline], TandemError | None]:
        """Ask one turn after the other, each with what was said before: the answers, up to a failure, and that."""
        timelines: list[Timeline] = []
        ticket = None if self._tickets is None else next(self._tickets)
        messages: list[Message] = list(prompt.opening)
        try:
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                body = self._sampling.body(with_ticket(messages, ticket), arm, max_tokens=prompt.max_tokens)
                timelines.append(await self._client.answer(body))
                messages.append({"role": "assistant", "content": timelines[-1].text})
        except TandemError as error:
            return timelines, error
        finally:
            done()
        return timelines, None
