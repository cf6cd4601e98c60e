"""From what a run has seen to its figures: one line for each concurrency, category and arm. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tandem.bench.arms import BASELINE
from tandem.bench.session import GroupRun, Observation, Records
from tandem.bench.statistics import Ratio, Spread, median_ratio, paired_ratios, ratio_of_rates, spread
from tandem.bench.timeline import Speculation, Timeline, added

ALL: Final = "all"  # categories together


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """An arm over the baseline, paired. Above 1 is better, but for the time to first token."""

    decode_speed: Ratio | None  # tokens per second after the first token
    request_speed: Ratio | None  # tokens per second end to end
    first_token: Ratio | None  # seconds to the first token
    throughput: Ratio | None  # tokens per second of all requests together, over whole groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What was drafted and taken. None: of nothing. A position's rate is of rounds with a draft, long enough or not."""

    rate: float | None
    length: float | None
    rate_by_position: tuple[float, ...]
    rounds: int
    draftless_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Where the time of an answered request goes, in seconds per token of the answer, prefill included."""

    draft: float
    verify: float
    network: float
    rest: float  # gateway, HTTP, this client, and waiting for a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The figures of one arm. Without `ratios`: the baseline."""

    concurrency: int
    category: str
    arm: str
    num_requests: int
    num_tokens: int
    ratios: Ratios | None
    total_tokens_per_second: float | None  # of whole groups, from first request to last answer's end
    first_token_seconds: Spread | None
    seconds_per_token: Spread | None
    gap_seconds: Spread | None
    tokens_per_second: Spread | None  # of a request, end to end
    acceptance: Acceptance
    stages: Stages | None
    bytes_per_round: float | None  # of rounds with a draft
    cpu_seconds_per_1000_tokens: Mapping[str, float]  # by process
    resident_bytes: Mapping[str, float]  # the most that was seen


def summarise(records: Records, *, arms: Sequence[str], categories: Sequence[str]) -> tuple[Line, ...]:
    """Lines by concurrency, then category (all together at the end), then arm. What was not asked has no line."""
    lines: list[Line] = []
    for level in sorted({each.concurrency for each in records.runs}):
        for category in (*categories, ALL) if len(categories) > 1 else categories:

            def belongs(each: Observation | GroupRun, level: int = level, category: str = category) -> bool:
                return each.concurrency == level and category in (ALL, each.category)

            seen = [each for each in records.observations if belongs(each)]
            runs = [each for each in records.runs if belongs(each)]
            lines += [_line(level, category, arm, seen, runs) for arm in arms if any(each.arm == arm for each in runs)]
    return tuple(lines)


def never_speculated(records: Records, arms: Sequence[str]) -> list[str]:
    """Those of `arms`, which should have, for which not one token was drafted."""
    drafted = {each.arm for each in records.observations if each.timeline.speculation.drafted}
    asked = {each.arm for each in records.observations}
    return [arm for arm in arms if arm in asked and arm not in drafted]


def _line(level: int, category: str, arm: str, seen: Sequence[Observation], runs: Sequence[GroupRun]) -> Line:
    answers = [each.timeline for each in seen if each.arm == arm]
    own_runs = [each for each in runs if each.arm == arm]
    whole = [each for each in own_runs if each.complete]
    num_tokens = sum(answer.num_tokens for answer in answers)
    figures = added(answer.speculation for answer in answers)
    rounds_with_draft = figures.rounds - figures.draftless_rounds
    return Line(
        concurrency=level,
        category=category,
        arm=arm,
        num_requests=len(answers),
        num_tokens=num_tokens,
        ratios=None if arm == BASELINE.name else _ratios(arm, seen, runs),
        total_tokens_per_second=(
            sum(each.num_tokens for each in whole) / sum(each.seconds for each in whole) if whole else None
        ),
        first_token_seconds=spread([answer.first_seconds for answer in answers]),
        seconds_per_token=spread([value for answer in answers if (value := answer.seconds_per_token) is not None]),
        gap_seconds=spread([gap for answer in answers for gap in answer.gap_seconds]),
        tokens_per_second=spread([answer.tokens_per_second for answer in answers]),
        acceptance=_acceptance(figures),
        stages=_stages(answers, figures) if num_tokens else None,
        bytes_per_round=figures.bytes_sent / rounds_with_draft if rounds_with_draft else None,
        cpu_seconds_per_1000_tokens=_cpu_per_1000(own_runs),
        resident_bytes=_most(own_runs),
    )


def _ratios(arm: str, seen: Sequence[Observation], runs: Sequence[GroupRun]) -> Ratios:
    def of(figure: Callable[[Timeline], float | None]) -> Ratio | None:
        values: dict[str, dict[tuple[str, tuple[int, int]], float]] = {arm: {}, BASELINE.name: {}}
        for each in seen:
            if each.arm in values and (value := figure(each.timeline)) is not None:
                values[each.arm][each.prompt, (each.turn, each.repeat)] = value
        return median_ratio(list(paired_ratios(values[arm], values[BASELINE.name]).values()))

    def decode_speed(timeline: Timeline) -> float | None:
        return None if timeline.seconds_per_token is None else 1.0 / timeline.seconds_per_token

    whole = {(each.arm, each.group): each for each in runs if each.complete}
    pairs = [
        (run, whole[BASELINE.name, group])
        for (name, group), run in whole.items()
        if name == arm and (BASELINE.name, group) in whole
    ]
    return Ratios(
        decode_speed=of(decode_speed),
        request_speed=of(lambda timeline: timeline.tokens_per_second),
        first_token=of(lambda timeline: timeline.first_seconds),
        throughput=ratio_of_rates(
            [(ours.num_tokens, theirs.num_tokens) for ours, theirs in pairs],
            [(ours.seconds, theirs.seconds) for ours, theirs in pairs],
        ),
    )


def _acceptance(figures: Speculation) -> Acceptance:
    rounds_with_draft = figures.rounds - figures.draftless_rounds
    reached = [count for count in figures.accepted_per_position if count]
    return Acceptance(
        rate=figures.accepted / figures.drafted if figures.drafted else None,
        length=1.0 + figures.accepted / figures.rounds if figures.rounds else None,
        # Counts never rise from a position to the next, so those above zero are the first ones.
        rate_by_position=tuple(count / rounds_with_draft for count in reached) if rounds_with_draft else (),
        rounds=figures.rounds,
        draftless_rounds=figures.draftless_rounds,
    )


def _stages(answers: Sequence[Timeline], figures: Speculation) -> Stages:
    num_tokens = sum(answer.num_tokens for answer in answers)
    inside = figures.draft_seconds + figures.verify_seconds + figures.network_seconds
    whole = sum(answer.last_seconds for answer in answers)
    return Stages(
        draft=figures.draft_seconds / num_tokens,
        verify=figures.verify_seconds / num_tokens,
        network=figures.network_seconds / num_tokens,
        rest=max(0.0, whole - inside) / num_tokens,
    )


def _cpu_per_1000(runs: Sequence[GroupRun]) -> dict[str, float]:
    """Of the groups in which the process told its time."""
    per_1000: dict[str, float] = {}
    for name in dict.fromkeys(name for run in runs for name in run.cpu_seconds):
        told = [run for run in runs if name in run.cpu_seconds]
        if num_tokens := sum(run.num_tokens for run in told):
            per_1000[name] = 1000.0 * sum(run.cpu_seconds[name] for run in told) / num_tokens
    return per_1000


def _most(runs: Sequence[GroupRun]) -> dict[str, float]:
    most: dict[str, float] = {}
    for run in runs:
        for name, num_bytes in run.resident_bytes.items():
            most[name] = max(num_bytes, most.get(name, 0.0))
    return most
