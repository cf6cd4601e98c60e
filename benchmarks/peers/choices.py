"""Which setting is best, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.peers.peer import Prompt, Result

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """An arm after tuning: tokens per second by setting, why settings failed, and the best. None: all failed."""

    best: str | None
    rates: Mapping[str, float]
    failures: Mapping[str, str]


def rate_of(results: Sequence[Result]) -> float:
    """Tokens per second over all answers together."""
    return sum(result.num_tokens for result in results) / sum(result.total_seconds for result in results)


def best_setting(rates: Mapping[str, float], failures: Mapping[str, str]) -> Tuned:
    """The fastest one; of equals the first."""
    best = max(rates, key=lambda name: rates[name]) if rates else None
    return Tuned(best=best, rates=dict(rates), failures=dict(failures))


def extremes(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The shortest and the longest, to warm up with: kernels are made, and buffers grown, for lengths as they come."""
    return [choose(prompts, key=lambda prompt: len(prompt.token_ids)) for choose in (min, max)]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """`items` in the order of turn number `turn`: the first moves on by one each turn, so that each is first as often.

    In every second cycle the order is reversed: nobody always comes right after the same other.
    """
    if not items:
        return []
    cycle, first = divmod(turn, len(items))
    order = [*items[first:], *items[:first]]
    return order[::-1] if cycle % 2 else order
