"""Medians, spreads, and intervals by the bootstrap. Pure; every interval is a function of its data alone.

A ratio is always paired: the same prompt, at the same concurrency, in two arms one right after the other. Prompts
differ from each other by far more than arms do, and pairing takes that out.

Intervals are percentile bootstraps (Efron 1979): units are drawn again with replacement, the statistic is computed of
each draw, and the middle 95 % of these are the interval. The units are prompts, or groups where a figure is one of a
whole group, and not single requests: repeats and turns of one prompt are not independent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

CONFIDENCE: Final = 0.95
# Of five units all lie on one side of the true median with probability 2 / 2^5, more than 5 %: no interval made of
# them can keep its promise.
MIN_UNITS: Final = 6
_RESAMPLES: Final = 5_000
_SEED: Final = 0  # the same data, the same interval
_MAX_DRAWN: Final = 1 << 22  # indices at once, 32 MiB

Key = TypeVar("Key", bound=Hashable)
Repeat = TypeVar("Repeat", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `count` values: the median, the quartiles, and the 95th percentile."""

    count: int
    median: float
    lower_quartile: float
    upper_quartile: float
    p95: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """An arm over the baseline, from `count` units. `low` and `high` are the 95 % interval; None of too few units."""

    count: int
    estimate: float
    low: float | None
    high: float | None


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing. Percentiles between two values are interpolated linearly."""
    if not values:
        return None
    quarter, half, three, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 50, 75, 95])
    return Spread(len(values), float(half), float(quarter), float(three), float(high))


def paired_ratios(
    values: Mapping[tuple[Key, Repeat], float], baseline: Mapping[tuple[Key, Repeat], float]
) -> dict[Key, float]:
    """values / baseline for each unit; of a unit's repeats, the median. Keys: (unit, repeat); lonely ones drop out."""
    ratios: defaultdict[Key, list[float]] = defaultdict(list)
    for (unit, repeat), value in values.items():
        if (divisor := baseline.get((unit, repeat), 0.0)) > 0.0:
            ratios[unit].append(value / divisor)
    return {unit: float(np.median(found)) for unit, found in ratios.items()}


def median_ratio(ratios: Sequence[float]) -> Ratio | None:
    """The median of paired ratios, with its interval; None of nothing."""
    if not ratios:
        return None
    data = np.asarray(ratios, dtype=np.float64)
    draws = [np.median(data[drawn], axis=1) for drawn in _resampled(len(data))]
    return _ratio(len(data), float(np.median(data)), draws)


def ratio_of_rates(tokens: Sequence[tuple[float, float]], seconds: Sequence[tuple[float, float]]) -> Ratio | None:
    """Tokens per second of an arm over the baseline's, each over all groups together; None of nothing.

    One pair (arm, baseline) for each group. Groups are drawn as pairs.
    """
    if not tokens:
        return None
    counts, times = np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64)  # [groups, 2]

    def rate(count: NDArray[np.float64], time: NDArray[np.float64]) -> NDArray[np.float64]:
        """[..., groups, 2] to [...]."""
        totals = count.sum(axis=-2) / time.sum(axis=-2)
        result: NDArray[np.float64] = totals[..., 0] / totals[..., 1]
        return result

    draws = [rate(counts[drawn], times[drawn]) for drawn in _resampled(len(counts))]
    return _ratio(len(counts), float(rate(counts, times)), draws)


def _resampled(count: int) -> list[NDArray[np.int64]]:
    """Indices of bootstrap samples, [draws, count] each; none where there are too few units."""
    if count < MIN_UNITS:
        return []
    random = np.random.default_rng(_SEED)
    at_once = max(1, min(_RESAMPLES, _MAX_DRAWN // count))
    sizes = [at_once] * (_RESAMPLES // at_once) + ([_RESAMPLES % at_once] if _RESAMPLES % at_once else [])
    return [random.integers(0, count, (size, count)) for size in sizes]


def _ratio(count: int, estimate: float, draws: Sequence[NDArray[np.float64]]) -> Ratio:
    if not draws:
        return Ratio(count, estimate, None, None)
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(np.concatenate(list(draws)), [tail, 100.0 - tail])
    return Ratio(count, estimate, float(low), float(high))
