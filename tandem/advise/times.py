"""How long a round takes by the number of its drafted tokens, by stage, out of measured rounds. Pure.

One request at a time, every round's own figures say it: medians by the number of drafted tokens (`times_alone`). With
several at once a forward is shared, and its time follows from what all of them drafted, of which a round knows only its
own; there the means of whole arms say it, each with its mean number of drafted tokens (`times_together`). Medians where
they can be had, since another process that wakes up adds to a mean: 100 ms in one of eight rounds of 15 ms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median
from typing import Final

from tandem.advise.answers import Answer
from tandem.bench.timeline import RoundTrace

_ENOUGH: Final = 5  # rounds with so many drafted tokens; fewer say nothing of that number

Points = Mapping[float, float]  # seconds by drafted tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a round with 0, 1, ..., k drafted tokens; `rest` and `plain` do not depend on them."""

    verify: tuple[float, ...]  # inside the target
    draft: tuple[float, ...]  # inside the draft service, where the draft was not prepared
    wait: tuple[float, ...]  # network and serialisation
    rest: float  # gateway, HTTP, client, once a round
    hit_rate: float  # in what part of the rounds with a draft it was prepared
    plain: float  # a token of plain decoding, all stages together


def times_alone(arms: Sequence[Sequence[Answer]], plain: Sequence[Answer], *, most: int) -> Times:
    """One request at a time, from arms with a k of their own each, up to `most`, and from plain decoding."""
    rounds = [each for arm in arms for answer in arm for each in answer.rounds]
    plain_rounds = [each for answer in plain for each in answer.rounds]
    return Times(
        verify=rising(_medians([*rounds, *plain_rounds], lambda each: each.verify_seconds), most=most),
        draft=rising(_drafting(arms), most=most),
        wait=rising(_medians(rounds, lambda each: each.network_seconds), most=most),
        rest=_median([answer.rest_seconds for arm in arms for answer in arm]),
        hit_rate=_hit_rate(rounds),
        plain=_median([each.verify_seconds for each in plain_rounds])
        + _median([each.network_seconds for each in plain_rounds])
        + _median([answer.rest_seconds for answer in plain]),
    )


def times_together(arms: Sequence[Sequence[Answer]], plain: Sequence[Answer], *, most: int) -> Times:
    """Several requests at once, from the answers of one arm or more, each with a k of its own."""
    by_arm = [[each for answer in arm for each in answer.rounds] for arm in arms]
    by_arm = [rounds for rounds in by_arm if rounds]
    plain_rounds = [each for answer in plain for each in answer.rounds]

    def points(figure: Callable[[RoundTrace], float], *more: tuple[float, float]) -> Points:
        means = {fmean(each.drafted for each in rounds): fmean(map(figure, rounds)) for rounds in by_arm}
        return dict(more) | means

    together = [answer for arm in arms for answer in arm]
    verify_plain = fmean(each.verify_seconds for each in plain_rounds)
    wait_plain = fmean(each.network_seconds for each in plain_rounds)
    return Times(
        verify=rising(points(lambda each: each.verify_seconds, (0.0, verify_plain)), most=most),
        draft=rising(_drafting(arms), most=most),
        wait=rising(points(lambda each: each.network_seconds, (0.0, wait_plain)), most=most),
        rest=_median([answer.rest_seconds for answer in together]),
        hit_rate=_hit_rate([each for rounds in by_arm for each in rounds]),
        plain=verify_plain + wait_plain + _median([answer.rest_seconds for answer in plain]),
    )


def for_category(own: Times, everyone: Times, answers: Sequence[Answer], plain: Sequence[Answer]) -> Times:
    """A category's times: its own forwards, whose time depends on how long its texts are; where it has too few with so
    many drafted tokens, those of all categories, in proportion. Draft and way are everybody's."""
    most = len(everyone.verify) - 1
    mine = _medians([each for answer in (*answers, *plain) for each in answer.rounds], lambda each: each.verify_seconds)
    level = own.verify[0] / everyone.verify[0] if everyone.verify[0] > 0.0 else 1.0
    points = {float(n): everyone.verify[n] * level for n in range(most + 1)} | dict(mine)
    return replace(everyone, verify=rising(points, most=most), plain=own.plain, rest=own.rest)


def rising(points: Points, *, most: int) -> tuple[float, ...]:
    """Seconds at 0, 1, ..., `most`: straight lines between the points, and the last one's slope beyond them.

    More tokens never take less: where a point says so, that is noise, and the one before it holds. A single point is a
    constant; of no points there is no time.
    """
    known = sorted(points.items())
    if not known:
        return (0.0,) * (most + 1)
    xs = [x for x, _ in known]
    ys = list(accumulate((y for _, y in known), max))

    def at(x: float) -> float:
        if len(xs) == 1 or x <= xs[0]:
            return ys[0]
        index = next((index for index in range(1, len(xs)) if x <= xs[index]), len(xs) - 1)
        slope = (ys[index] - ys[index - 1]) / (xs[index] - xs[index - 1])
        return ys[index - 1] + slope * (x - xs[index - 1])

    return tuple(at(float(n)) for n in range(most + 1))


def _drafting(arms: Sequence[Sequence[Answer]]) -> Points:
    """A point for each arm: the means of its drafts that were not prepared.

    Not by the number of tokens: a drafter of two kinds (n-grams where the text repeats itself, else a model) makes
    short drafts in microseconds and long ones in milliseconds, and with a smaller k the model's would be short too.
    """
    points = {0.0: 0.0}
    for arm in arms:
        fresh = [each for answer in arm for each in answer.rounds if each.drafted and not each.prepared]
        if fresh:
            points[fmean(each.drafted for each in fresh)] = fmean(each.draft_seconds for each in fresh)
    return points


def _medians(rounds: Sequence[RoundTrace], figure: Callable[[RoundTrace], float]) -> dict[float, float]:
    """By drafted tokens, of those numbers that were seen often enough; of all that were seen, where none was."""
    by_number: defaultdict[float, list[float]] = defaultdict(list)
    for each in rounds:
        by_number[float(each.drafted)].append(figure(each))
    enough = {number: median(values) for number, values in by_number.items() if len(values) >= _ENOUGH}
    return enough or {number: median(values) for number, values in by_number.items()}


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _hit_rate(rounds: Sequence[RoundTrace]) -> float:
    drafted = [each for each in rounds if each.drafted]
    return fmean(each.prepared for each in drafted) if drafted else 0.0
