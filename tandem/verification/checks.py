"""From samples to verdicts. Pure.

A verdict that nobody earned is none: where nothing was drafted, accepted or rejected, or where the samples were too few
to see even a large difference, the verdict is "not tested", and that fails the run unless its user allows it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from tandem.verification.plan import LAW_TOKENS, Case, Plan, Rule
from tandem.verification.sampler import Sample
from tandem.verification.statistics import Comparison, chi_square_tail, compare, holm, smallest_visible_deviation

FALSE_ALARM = 1e-4  # probability that a right service fails the whole run
POWER = 0.95  # with which the smallest visible deviation is found
# Samples that would not have shown this much of a difference tested nothing. A broken rule is off by 0.1 to 0.3.
LARGEST_VISIBLE = 0.4
ALL_SETS = "all of them"

_LAWS: Mapping[str, tuple[int, ...]] = {
    **{f"token {position + 1}": (position,) for position in range(LAW_TOKENS)},
    f"first {LAW_TOKENS}": tuple(range(LAW_TOKENS)),
}


class Verdict(enum.Enum):
    """What a line of the report says."""

    PASSED = "pass"
    FAILED = "FAIL"
    UNTESTED = "not tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class LawLine:
    """One law, with and without speculation. `adjusted` is the p-value after Holm, None where there was no test."""

    parameters: str
    drafter: str
    law: str
    drafted: int
    accepted: int
    comparison: Comparison
    adjusted: float | None = None
    visible: float | None = None
    verdict: Verdict = Verdict.PASSED
    remark: str = ""
    excused: bool = False  # not tested, for a reason that lies in the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Where a text first differs from plain decoding's; a token that is missing is None."""

    case: str
    position: int
    plain: int | None
    speculative: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLine:
    """Texts that had to be equal to plain decoding's."""

    rule: str  # "coupled" or "greedy"
    drafter: str
    num_draft_tokens: int
    num_texts: int
    drafted: int
    accepted: int
    mismatches: tuple[Mismatch, ...]
    verdict: Verdict
    remark: str = ""


def law_lines(plan: Plan, samples: Sequence[Sample]) -> list[LawLine]:
    """Compare every drafter's samples with plain decoding's; `samples` in the order of the plan's rounds."""
    arms = plan.arms
    num_rounds = len(samples) // len(arms)
    drawn = {
        (arm.parameters.name, arm.drafter): samples[index :: len(arms)][:num_rounds] for index, arm in enumerate(arms)
    }
    lines: list[LawLine] = []
    for drafter in plan.drafters:
        ours = []
        for parameters in plan.parameter_sets:
            plain, speculative = drawn[parameters.name, None], drawn[parameters.name, drafter]
            ours += _set_lines(parameters.name, drafter, plain, speculative)
        lines += ours
        if len(plan.parameter_sets) > 1:
            lines += [_together(drafter, law, [line for line in ours if line.law == law]) for law in list(_LAWS)[1:]]
    return _judge(lines)


def _set_lines(name: str, drafter: str, plain: Sequence[Sample], speculative: Sequence[Sample]) -> list[LawLine]:
    drafted = sum(sample.drafted for sample in speculative)
    accepted = sum(sample.accepted for sample in speculative)
    return [
        LawLine(
            parameters=name,
            drafter=drafter,
            law=law,
            drafted=drafted,
            accepted=accepted,
            comparison=compare(_outcomes(plain, positions), _outcomes(speculative, positions)),
        )
        for law, positions in _LAWS.items()
    ]


def _together(drafter: str, law: str, lines: Sequence[LawLine]) -> LawLine:
    """The same law under all parameter sets: sums of independent chi-squares see what each is too small to see.

    Sets share no samples. The smallest visible deviation is then that of an error of one size in all of them.
    """
    parts = [line.comparison for line in lines]
    statistic = sum(part.statistic for part in parts)
    degrees = sum(part.degrees for part in parts)
    num_samples = sum(part.num_samples for part in parts)
    return LawLine(
        parameters=ALL_SETS,
        drafter=drafter,
        law=law,
        drafted=sum(line.drafted for line in lines),
        accepted=sum(line.accepted for line in lines),
        comparison=Comparison(
            num_samples=num_samples,
            num_cells=degrees + 1,
            statistic=statistic,
            p_value=chi_square_tail(statistic, degrees) if degrees else 1.0,
            distance=sum(part.distance * part.num_samples for part in parts) / num_samples,
        ),
    )


def _judge(lines: Sequence[LawLine]) -> list[LawLine]:
    tested = [line for line in lines if line.comparison.degrees]
    if not tested:
        return [replace(line, verdict=Verdict.UNTESTED, remark="only one outcome") for line in lines]
    visible = cache(
        lambda num_samples, degrees: smallest_visible_deviation(
            num_samples=num_samples, degrees=degrees, false_alarm=FALSE_ALARM / len(tested), power=POWER
        )
    )
    adjusted = iter(holm(line.comparison.p_value for line in tested))
    judged: list[LawLine] = []
    for line in lines:
        if not line.comparison.degrees:
            judged.append(replace(line, verdict=Verdict.UNTESTED, remark="only one outcome", excused=True))
            continue
        p_value = next(adjusted)
        verdict = Verdict.FAILED if p_value < FALSE_ALARM else Verdict.PASSED
        judged.append(
            replace(
                line,
                adjusted=p_value,
                visible=visible(line.comparison.num_samples, line.comparison.degrees),
                verdict=verdict,
            )
        )
    return [_earned(line, judged) for line in judged]


def _earned(line: LawLine, lines: Sequence[LawLine]) -> LawLine:
    """A pass is taken back where it came too easily. A failure stays one: a difference is a difference."""
    if line.verdict is Verdict.FAILED:
        return line
    group = [other for other in lines if (other.parameters, other.drafter) == (line.parameters, line.drafter)]
    visible = [other.visible for other in group if other.visible is not None]
    if remark := _idle(line.drafted, line.accepted):
        return replace(line, verdict=Verdict.UNTESTED, remark=remark, excused=False)
    if not visible or min(visible) > LARGEST_VISIBLE:
        remark = f"too few samples: {line.comparison.num_samples}" if visible else "only one outcome, whatever the law"
        return replace(line, verdict=Verdict.UNTESTED, remark=remark, excused=False)
    return line


def text_lines(plan: Plan, cases: Sequence[Case], samples: Sequence[Sample], *, allowed_ties: float) -> list[TextLine]:
    """Compare texts with plain decoding's; at most the share `allowed_ties` of a line's may differ.

    `samples` in the order of the plan's `case_requests`.
    """
    rules: tuple[tuple[str, Rule], ...] = (("coupled", "coupled"), ("greedy", "rejection"))
    width = len(plan.ways)
    lines: list[TextLine] = []
    for label, rule in rules:
        rows = [(case.name, samples[i * width : (i + 1) * width]) for i, case in enumerate(cases) if case.rule == rule]
        for drafter in plan.drafters:
            columns = {k: column for column, (name, k) in enumerate(plan.ways) if name == drafter}
            texts = [row[column] for _, row in rows for column in columns.values()]
            # Of all lengths together: a text of which one length never drafted a wrong token is no less of a test.
            idle = _idle(sum(text.drafted for text in texts), sum(text.accepted for text in texts))
            for num_draft_tokens, column in columns.items():
                found = [_difference(name, row[0], row[column]) for name, row in rows]
                mismatches = tuple(mismatch for mismatch in found if mismatch is not None)
                verdict = Verdict.UNTESTED if idle else Verdict.PASSED
                if len(mismatches) > allowed_ties * len(rows):
                    verdict = Verdict.FAILED
                lines.append(
                    TextLine(
                        rule=label,
                        drafter=drafter,
                        num_draft_tokens=num_draft_tokens,
                        num_texts=len(rows),
                        drafted=sum(row[column].drafted for _, row in rows),
                        accepted=sum(row[column].accepted for _, row in rows),
                        mismatches=mismatches,
                        verdict=verdict,
                        remark=idle if verdict is Verdict.UNTESTED else "",
                    )
                )
    return lines


def _difference(case: str, plain: Sample, speculative: Sample) -> Mismatch | None:
    ours, theirs = speculative.token_ids, plain.token_ids
    if ours == theirs:
        return None
    position = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
    )
    return Mismatch(
        case=case,
        position=position,
        plain=theirs[position] if position < len(theirs) else None,
        speculative=ours[position] if position < len(ours) else None,
    )


def _idle(drafted: int, accepted: int) -> str:
    """Why speculation had no chance to do wrong; empty where it had."""
    if drafted == 0:
        return "nothing was drafted"
    if accepted == 0:
        return "nothing was accepted"
    return "nothing was rejected" if accepted == drafted else ""


def _outcomes(samples: Sequence[Sample], positions: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(sample.token_ids[position] for position in positions) for sample in samples]
