"""Predictions: rounds as k would have them, times what such rounds take. Pure.

The speed-up of an answer is the time that plain decoding takes for its tokens over the sum of its rounds' times; that
of many answers, both summed. Intervals are bootstrap intervals over prompts (tandem/bench/statistics.py): they say what
other prompts of this kind would give, not how good the model of times is, which the checks say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tandem.advise.answers import Answer, paired
from tandem.advise.replay import Outcome, Positions, num_tokens, positions, replay
from tandem.advise.times import Times, for_category, times_alone
from tandem.bench.statistics import Ratio, ratio_of_rates
from tandem.speedup import acceptance_rate, overlapped_seconds, serial_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds of a mean round."""

    draft: float
    verify: float
    wait: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.wait + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one drafter is, on one category's prompts or on all, one request at a time, asked for `asked` tokens."""

    drafter: str
    category: str
    asked: int
    answers: tuple[Answer, ...]
    positions: Positions
    rate: float | None  # alpha: accepted over decided, see tandem/speedup.py
    times: Times
    bytes_per_round: float

    @property
    def draft_cost(self) -> float:
        """c: a draft token's time over that of a token of plain decoding."""
        return self.times.draft[-1] / self.asked / self.times.plain if self.times.plain > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One k of one drafter, at one load, over plain decoding there."""

    drafter: str
    concurrency: int
    category: str
    k: int
    tokens_per_round: float
    stages: Stages  # one after the other
    serial: Ratio  # no draft is prepared
    expected: Ratio  # prepared as often as it was measured to be
    overlapped: Ratio  # prepared always: the bound
    plain_tokens_per_second: float  # of one request

    @property
    def steps(self) -> float:
        """How long a round takes, in tokens of plain decoding, as it is expected to run."""
        return self.tokens_per_round / self.expected.estimate

    @property
    def tokens_per_second(self) -> float:
        """Of one request, after its first token."""
        return self.expected.estimate * self.plain_tokens_per_second


def profiles(
    drafter: str,
    answers: Sequence[Answer],
    plain: Sequence[Answer],
    *,
    asked: int,
    probes: Sequence[Answer],
    categories: Sequence[str],
    all_name: str,
) -> dict[str, Profile]:
    """By category, all together last. `probes` were drafted with a smaller k: they add to the times alone."""
    everyone = times_alone([answers, probes], plain, most=asked)
    found: dict[str, Profile] = {}
    for category in categories:
        own = [each for each in answers if each.category == category]
        own_plain = [each for each in plain if each.category == category]
        own_probes = [each for each in probes if each.category == category]
        if own and own_plain:
            alone = times_alone([own, own_probes], own_plain, most=asked)
            times = for_category(alone, everyone, [*own, *own_probes], own_plain)
            found[category] = _profile(drafter, category, own, times, asked=asked)
    found[all_name] = _profile(drafter, all_name, answers, everyone, asked=asked)
    return found


def predict(
    profile: Profile,
    *,
    k: int,
    concurrency: int,
    times_of: Mapping[str, Times],
    plain_tokens_per_second: float,
) -> Prediction:
    """`times_of`: each category's, at that load; the profile's own where a category has none."""
    tokens: list[tuple[float, float]] = []
    seconds: dict[str, list[tuple[float, float]]] = {"serial": [], "expected": [], "overlapped": []}
    rounds_of: list[tuple[Outcome, Times]] = []
    for answer in profile.answers:
        times = times_of.get(answer.category, profile.times)
        rounds = replay(answer.outcomes, asked=profile.asked, k=k)
        count = float(num_tokens(rounds))
        tokens.append((count, count))
        for name, hit_rate in (("serial", 0.0), ("expected", times.hit_rate), ("overlapped", 1.0)):
            taken = sum(_seconds(each, times, hit_rate=hit_rate) for each in rounds)
            seconds[name].append((taken, count * times.plain))
        rounds_of += [(each, times) for each in rounds]
    ratios = {name: ratio_of_rates(tokens, pairs) for name, pairs in seconds.items()}
    serial, expected, overlapped = ratios["serial"], ratios["expected"], ratios["overlapped"]
    assert serial is not None
    assert expected is not None
    assert overlapped is not None
    return Prediction(
        drafter=profile.drafter,
        concurrency=concurrency,
        category=profile.category,
        k=k,
        tokens_per_round=sum(count for count, _ in tokens) / len(rounds_of),
        stages=Stages(
            draft=fmean(times.draft[each.drafted] for each, times in rounds_of),
            verify=fmean(times.verify[each.drafted] for each, times in rounds_of),
            wait=fmean(times.wait[each.drafted] for each, times in rounds_of),
            rest=fmean(times.rest for _, times in rounds_of),
        ),
        serial=serial,
        expected=expected,
        overlapped=overlapped,
        plain_tokens_per_second=plain_tokens_per_second,
    )


def measured_speedup(answers: Sequence[Answer], plain: Sequence[Answer]) -> Ratio | None:
    """Tokens per second over those of plain decoding, over all pairs; None of nothing."""
    pairs = paired(answers, plain)
    return ratio_of_rates(
        [(float(ours.num_tokens), float(theirs.num_tokens)) for ours, theirs in pairs],
        [(ours.seconds, theirs.seconds) for ours, theirs in pairs],
    )


def rate_of(answers: Sequence[Answer]) -> float | None:
    """Tokens per second of one request, after its first; None of nothing."""
    seconds = sum(each.seconds for each in answers)
    return sum(each.num_tokens for each in answers) / seconds if seconds > 0.0 else None


def _profile(drafter: str, category: str, answers: Sequence[Answer], times: Times, *, asked: int) -> Profile:
    outcomes = [outcome for answer in answers for outcome in answer.outcomes]
    with_draft = sum(each.drafted > 0 for answer in answers for each in answer.rounds)
    return Profile(
        drafter=drafter,
        category=category,
        asked=asked,
        answers=tuple(answer for answer in answers if answer.outcomes),
        positions=positions(outcomes, asked=asked),
        rate=acceptance_rate(sum(each.accepted for each in outcomes), sum(each.accepted < asked for each in outcomes)),
        times=times,
        bytes_per_round=sum(answer.bytes_sent for answer in answers) / with_draft if with_draft else 0.0,
    )


def _seconds(outcome: Outcome, times: Times, *, hit_rate: float) -> float:
    n = outcome.drafted
    verify, draft, wait = times.verify[n], times.draft[n], times.wait[n] + times.rest
    if hit_rate == 0.0:
        return serial_seconds(verify=verify, draft=draft, wait=wait)
    return overlapped_seconds(verify=verify, draft=draft, wait=wait, hit_rate=hit_rate)
