"""What to do, in one paragraph. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tandem.advise.predict import Prediction
from tandem.advise.study import ALL, Check, Choice, Study, best_of, costs_of
from tandem.bench.statistics import Ratio
from tandem.speedup import break_even

# What a gain must be to be worth having: prediction and measurement are each some per cent off.
_LEAST_GAIN: Final = 0.03
_CLOSE: Final = 0.10  # a prediction within this of what was measured is called good


def choose(predictions: Sequence[Prediction], checks: Sequence[Check]) -> tuple[Choice, ...]:
    """For every load the best prediction, and whether it is worth it: by the measurement too, where there is one."""
    choices: list[Choice] = []
    for level in sorted({each.concurrency for each in predictions}):
        best = best_of(predictions, concurrency=level)
        measured = next(
            (
                check.measured
                for check in checks
                if (check.concurrency, check.category, check.drafter, check.k) == (level, ALL, best.drafter, best.k)
            ),
            None,
        )
        estimates = [best.expected.estimate, *([] if measured is None else [measured.estimate])]
        choices.append(
            Choice(
                concurrency=level,
                prediction=best,
                measured=measured,
                worth=min(estimates) >= 1.0 + _LEAST_GAIN,
            )
        )
    return tuple(choices)


def second_k(best: int, *, most: int) -> int:
    """Another k to check at: half of the best or, of a small one, twice; so that two points lie apart."""
    return best // 2 if best >= 4 else min(most, 2 * best + 1)


def headline(study: Study) -> str:
    """Four words."""
    first = study.choices[0]
    if not first.worth:
        return "Do not speculate"
    return f"Speculate: {first.prediction.drafter}, k = {first.prediction.k}"


def paragraph(study: Study) -> str:
    """Whether to speculate for this traffic, how, what it gains, and how sure that is."""
    first, *others = study.choices
    sentences = _yes(study, first) if first.worth else _no(study, first)
    sentences += [_at_load(first, other) for other in others]
    sentences += _trust(study)
    return " ".join(sentences)


def _yes(study: Study, choice: Choice) -> list[str]:
    best = choice.prediction
    rates = {
        each.category: best_of(study.predictions, concurrency=1, category=each.category) for each in _by_category(study)
    }
    sentences = [
        f"Speculate, with the drafter {best.drafter} and {_tokens(best.k)} a round: one request at a time, "
        f"{_times(best.expected)} plain decoding by prediction{_measured(choice.measured)}.",
        f"A round brings {best.tokens_per_round:.2f} tokens and takes {best.steps:.2f} times as long as a plain step.",
    ]
    if choice.measured is not None and choice.measured.low is not None and choice.measured.low <= 1.0:
        sentences.append("That is not sure: the interval of the measurement includes 1. Measure with more prompts.")
    if len(rates) > 1:
        order = sorted(rates.values(), key=lambda each: each.expected.estimate)
        low, high = order[0], order[-1]
        sentences.append(
            f"It gains most on {high.category} ({high.expected.estimate:.2f}) and least on {low.category} "
            f"({low.expected.estimate:.2f})."
        )
        lost = [each.category for each in order if each.expected.estimate < 1.0 + _LEAST_GAIN]
        if lost:
            sentences.append(f"Do not speculate for {', '.join(lost)}: nothing is gained there.")
    automatic = _automatic(study)
    if automatic is not None:
        sentences.append(
            f'With "num_draft_tokens": "auto", which chooses k every round, {automatic.measured.estimate:.2f} '
            f"was measured{_preferred(automatic.measured, choice.measured)}."
        )
    return sentences


def _no(study: Study, choice: Choice) -> list[str]:
    best, profile = choice.prediction, study.best
    needed = break_even(costs_of(profile, k=best.k), most=best.k)
    rate = "nothing" if profile.rate is None else f"{profile.rate:.2f} of the tokens it is asked for"
    return [
        "Do not speculate for this traffic, because the best of what was tried, the drafter "
        f"{best.drafter} with {_tokens(best.k)} a round, is {_times(best.expected)} plain decoding by "
        f"prediction{_measured(choice.measured)}: a round brings {best.tokens_per_round:.2f} tokens and takes "
        f"{best.steps:.2f} times as long as a plain step.",
        f"The target accepts {rate}; at these costs "
        + ("no acceptance would be enough." if needed is None else f"it takes about {needed:.2f} to break even."),
        *_harmless(study),
        'Send "speculation": {"enabled": false}, or try another draft: `tandem distill` trains one on such prompts.',
    ]


def _harmless(study: Study) -> list[str]:
    automatic = _automatic(study)
    if automatic is None or automatic.measured.estimate < 1.0 - _LEAST_GAIN:
        return []
    return [
        f'"num_draft_tokens": "auto" gave up drafting, and was measured at {automatic.measured.estimate:.2f}: '
        "it does no harm."
    ]


def _at_load(first: Choice, choice: Choice) -> str:
    best = choice.prediction
    found = f"{best.expected.estimate:.2f} by prediction{_measured(choice.measured)}"
    if choice.worth:
        return f"With {choice.concurrency} at once, {_tokens(best.k)} are best: {found}."
    turn = "decode plainly" if first.worth else "the same"
    return f"With {choice.concurrency} at once, {turn}: the best k, {best.k}, gives {found}."


def _trust(study: Study) -> list[str]:
    errors = [abs(error) for check in study.checks if check.category == ALL and (error := check.error) is not None]
    if not errors:
        return ["No prediction was checked."]
    if max(errors) <= _CLOSE:
        return [f"Predictions over all prompts were within {max(1.0, 100 * max(errors)):.0f} % of what was measured."]
    return [
        f"Predictions were up to {100 * max(errors):.0f} % off what was measured: trust the measured figures alone."
    ]


def _automatic(study: Study) -> Check | None:
    return next(
        (each for each in study.checks if each.k is None and each.category == ALL and each.concurrency == 1), None
    )


def _by_category(study: Study) -> list[Prediction]:
    return [each for each in study.predictions if each.category != ALL and each.concurrency == 1 and each.k == 1]


def _preferred(automatic: Ratio, fixed: Ratio | None) -> str:
    if fixed is None or automatic.estimate < fixed.estimate * (1.0 - _LEAST_GAIN):
        return ""
    return ": leave it on that, it also gives way under load"


def _tokens(k: int) -> str:
    return f"{k} draft token{'s' if k > 1 else ''}"


def _times(ratio: Ratio) -> str:
    return f"{ratio.estimate:.2f}{_interval(ratio)} times as fast as"


def _measured(ratio: Ratio | None) -> str:
    return "" if ratio is None else f", {ratio.estimate:.2f}{_interval(ratio)} measured"


def _interval(ratio: Ratio) -> str:
    return "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
