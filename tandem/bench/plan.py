"""Which requests a run makes, in which order. Pure.

A group is up to `concurrency` prompts of one category that are asked at once in one arm; then the same ones are asked
in the next arm. Which arm is first changes from group to group (AB, BA, AB, ...), so that what drifts (a clock that is
throttled, a neighbour that wakes up) strikes all arms alike. Groups of all categories and levels take turns, so that a
run that is cut short has some of everything.

Model services reuse the computed prefix of a prompt that they have seen, so that the second arm would get the first
one's prefill for nothing. Therefore the first message begins with a line of its own, "Ticket 482 913 507": always three
groups of three digits, so that it is equally many tokens in every request, and never the same twice, in this run or in
another. `--shared-prefix` leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem.bench.arms import Arm
from tandem.bench.workload import Message, Prompt, Workload

_TICKETS: Final = 1_000_000_000
# Coprime to the number of tickets, so that all are different; neighbours look nothing alike.
_TICKET_STEP: Final = 617_283_951


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What all requests have in common. The seed goes along only where there is one."""

    max_tokens: int
    temperature: float
    seed: int | None

    def body(self, messages: Sequence[Message], arm: Arm, *, max_tokens: int | None) -> dict[str, Any]:
        """A streaming chat request; `max_tokens` is the prompt's own, where it has one."""
        body: dict[str, Any] = {
            "model": "tandem",
            "messages": list(messages),
            "max_tokens": self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens),
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": dict(arm.speculation),
        }
        return body if self.seed is None else {**body, "seed": self.seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Prompts that are asked at once, once in each arm, `arms` in their order."""

    index: int
    concurrency: int
    category: str
    repeat: int
    prompts: tuple[Prompt, ...]
    arms: tuple[Arm, ...]


def plan_groups(workload: Workload, arms: Sequence[Arm], *, levels: Sequence[int], repeats: int) -> list[Group]:
    """All groups of a run, in their order."""
    unordered: list[tuple[float, int, str, int, tuple[Prompt, ...]]] = []
    for category in workload.categories:
        prompts = [prompt for prompt in workload.prompts if prompt.category == category]
        for level in levels:
            cuts = [tuple(prompts[first : first + level]) for first in range(0, len(prompts), level)]
            # Where a group stands within its category and level, from 0 to 1, is when its turn comes.
            unordered += [
                ((repeat + (position + 0.5) / len(cuts)) / repeats, level, category, repeat, cut)
                for repeat in range(repeats)
                for position, cut in enumerate(cuts)
            ]
    unordered.sort(key=lambda entry: entry[0])  # stable: categories and levels stay in the order they were given
    seen: dict[tuple[int, str], int] = {}
    groups: list[Group] = []
    for index, (_, level, category, repeat, cut) in enumerate(unordered):
        turn = seen[level, category] = seen.get((level, category), -1) + 1
        # One group a category would have the same arm first at every level and category; the categories differ too.
        first = (turn + workload.categories.index(category) + levels.index(level)) % len(arms)
        order = (*arms[first:], *arms[:first])
        groups.append(
            Group(index=index, concurrency=level, category=category, repeat=repeat, prompts=cut, arms=tuple(order))
        )
    return groups


def tickets(start: int) -> Iterator[str]:
    """Lines for the beginning of prompts, all different. Runs that start elsewhere have others."""
    for count in range(_TICKETS):
        digits = f"{(start + count * _TICKET_STEP) % _TICKETS:09d}"
        yield f"Ticket {digits[:3]} {digits[3:6]} {digits[6:]}"


def with_ticket(messages: Sequence[Message], ticket: str | None) -> list[Message]:
    """`messages`, the first of which begins with the ticket's line."""
    if ticket is None:
        return list(messages)
    return [{**messages[0], "content": f"{ticket}\n\n{messages[0]['content']}"}, *messages[1:]]
