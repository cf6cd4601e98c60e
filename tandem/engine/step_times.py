"""How long a forward takes, by the number of its tokens: measured at start-up, and kept current by every round."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")

# Between these, times are interpolated; beyond the last, the last slope goes on.
_SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens
_LEVEL_STEP, _SHAPE_STEP = 0.1, 0.05  # how much one measurement counts
_SLOW_SECONDS = 0.1  # a forward of one token; such models are measured at two sizes
_MOST_REPEATS, _ENOUGH_SECONDS = 5, 0.3
_SETTLED = 0.9  # of the best time before: what is not below it is nothing new
_RUNS_UNTIL_COLD = 6


class StepTimes:
    """Seconds of a forward of one to many tokens, in rounds (not in prefill).

    `level` is the time of one token, which drifts with the length of contexts and what else the machine does; `shape`
    is how many times as long more tokens take, which is the model's and the engine's. Each measurement moves both.
    """

    def __init__(self, measured: Iterable[tuple[int, float]], *, change_seconds: float = 0.0) -> None:
        """From (tokens, seconds) pairs of ascending tokens, the first of one token.

        `change_seconds`: how much longer a forward takes whose size is not that of the one before.
        """
        self.change_seconds = change_seconds
        pairs = list(measured)
        if not pairs or pairs[0][0] != 1 or min(seconds for _, seconds in pairs) <= 0.0:
            raise ValueError("the first measurement must be of one token, and all must be positive")
        sizes, times = [size for size, _ in pairs], [seconds for _, seconds in pairs]
        self._level = times[0]
        self._shape = [max(1.0, _interpolate(size, sizes, times) / times[0]) for size in _SIZES]

    def observe(self, num_tokens: int, seconds: float) -> None:
        """One forward of rounds took so long. Sizes beyond the table's say nothing about it."""
        if not 1 <= num_tokens <= _SIZES[-1] or seconds <= 0.0:
            return
        expected = self.seconds(num_tokens)
        # A single slow forward (another process woke up) must not shift the table by its full size.
        ratio = min(max(seconds / expected, 0.5), 2.0)
        self._level *= 1.0 + _LEVEL_STEP * (ratio - 1.0)
        if num_tokens > 1:
            index = bisect_right(_SIZES, num_tokens) - 1
            self._shape[index] = max(1.0, self._shape[index] * (1.0 + _SHAPE_STEP * (ratio - 1.0)))

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a forward of so many tokens."""
        return self._level * _interpolate(num_tokens, _SIZES, self._shape)


def measure(run: Callable[[int], None], *, most_tokens: int) -> list[tuple[int, float]]:
    """(tokens, seconds) of `run(num_tokens)`, one forward; the best of two to five. Of slow models two sizes only.

    Sizes take turns: services start together, and load while others measure, and a hiccup that covers all times of a
    size would make its drafts look too dear. And they are run until that brings nothing: a graph of its own takes a
    size two runs to come to speed (32 tokens of SmolLM2-135M: 50 ms, 23, and 13 from then on). Eight texts that had 23
    for 13 drafted one token each where three pay.
    """
    run(1)  # the first forward of a process sets things up
    is_slow = _timed(run, 1) > _SLOW_SECONDS
    sizes = [size for size in _SIZES if size <= most_tokens and (size in (1, 8) or not is_slow)]
    passes = _repeated(lambda: [_timed(run, size) for size in sizes], least=2, settled=_nothing_new)
    return [(size, min(times)) for size, *times in zip(sizes, *passes, strict=True)]


def measure_change(run: Callable[[int], None], *, most_tokens: int) -> float:
    """Seconds by which `run(num_tokens)` is slower after runs of another size, there and back; a median.

    After several runs: what a graph of its own for the other size needs has then left the processor's caches (0.4 ms of
    SmolLM2-135M's 7; after a single run, 0.1). Nothing, of models so slow that it is.
    """
    small, large = 1, 16
    if most_tokens < large or _timed(run, small) > _SLOW_SECONDS:
        return 0.0

    def added() -> float:
        for _ in range(_RUNS_UNTIL_COLD):
            run(small)
        there, stayed, back, settled = (_timed(run, size) for size in (large, large, small, small))
        return (there - stayed + back - settled) / 2.0

    return max(0.0, median(_repeated(added, least=3, settled=lambda _: True)))


def _repeated(once: Callable[[], T], *, least: int, settled: Callable[[Sequence[T]], bool]) -> list[T]:
    """`once`, `least` times or more, until it is `settled`, and then as long as that keeps nobody waiting."""
    began = time.perf_counter()
    results: list[T] = []
    while len(results) < least or (
        len(results) < _MOST_REPEATS and not (settled(results) and time.perf_counter() - began >= _ENOUGH_SECONDS)
    ):
        results.append(once())
    return results


def _nothing_new(passes: Sequence[Sequence[float]]) -> bool:
    """Whether the last pass was nowhere much faster than all before it."""
    *before, last = passes
    return all(now >= _SETTLED * min(earlier) for now, *earlier in zip(last, *before, strict=True))


def _timed(run: Callable[[int], None], num_tokens: int) -> float:
    began = time.perf_counter()
    run(num_tokens)
    return time.perf_counter() - began


def _interpolate(x: int, xs: Sequence[int], ys: Sequence[float]) -> float:
    """Piecewise linear through the points, the last slope going on; a single point is a constant."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    index = min(bisect_right(xs, x), len(xs) - 1)
    x0, y0 = xs[index - 1], ys[index - 1]
    return y0 + (ys[index] - y0) * (x - x0) / (xs[index] - x0)
