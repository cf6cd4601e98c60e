"""All that one run of `tandem advise` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem.advise.predict import Prediction, Profile
from tandem.bench.plan import Sampling
from tandem.bench.report import Served
from tandem.bench.session import Failure
from tandem.bench.statistics import Ratio
from tandem.bench.workload import Workload
from tandem.speedup import Costs

ALL: Final = "all"  # categories together


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A prediction and what was measured afterwards. k is None where the gateway chose it, which is not predicted."""

    drafter: str
    concurrency: int
    category: str
    k: int | None
    predicted: Ratio | None
    measured: Ratio
    predicted_tokens: float | None  # a round
    measured_tokens: float

    @property
    def error(self) -> float | None:
        """How much the prediction is above what was measured, as a part of that."""
        return None if self.predicted is None else self.predicted.estimate / self.measured.estimate - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Plain decoding with so many requests at once."""

    concurrency: int
    tokens_per_second: float  # of one request, after its first token
    total_tokens_per_second: float  # of all together


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to do at one load. `worth`: whether to speculate at all."""

    concurrency: int
    prediction: Prediction  # the best one
    measured: Ratio | None  # where it was checked
    worth: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One run."""

    began: str  # ISO 8601
    seconds: float
    machine: Mapping[str, Any]
    served: Served
    workload: Workload
    sampling: Sampling
    most: int  # the largest k that was asked for
    loads: tuple[Load, ...]
    profiles: tuple[Profile, ...]  # by drafter, then category, all together last
    predictions: tuple[Prediction, ...]
    checks: tuple[Check, ...]
    choices: tuple[Choice, ...]  # by load
    failures: tuple[Failure, ...]

    @property
    def best(self) -> Profile:
        """The chosen drafter's, over all prompts."""
        return self.profile(self.choices[0].prediction.drafter, ALL)

    def profile(self, drafter: str, category: str) -> Profile:
        """Raises StopIteration where there is none."""
        return next(each for each in self.profiles if each.drafter == drafter and each.category == category)

    def curve(self, drafter: str, category: str, *, concurrency: int = 1) -> list[Prediction]:
        """One for each k, from 1."""
        return [
            each
            for each in self.predictions
            if (each.drafter, each.category, each.concurrency) == (drafter, category, concurrency)
        ]


def costs_of(profile: Profile, *, k: int) -> Costs:
    """A pair's times in plain steps, as the formulas take them: the straight line to the round with k draft tokens."""
    times = profile.times
    return Costs(
        draft=profile.draft_cost,
        verify_slope=(times.verify[k] - times.verify[0]) / k / times.plain,
        overhead=max(0.0, (times.verify[0] + times.wait[k] + times.rest) / times.plain - 1.0),
        hit_rate=times.hit_rate,
    )


def best_of(predictions: Sequence[Prediction], *, concurrency: int, category: str = ALL) -> Prediction:
    """The fastest as it is expected; of equals the one with the smaller k. Raises ValueError of none."""
    return max(
        (each for each in predictions if each.concurrency == concurrency and each.category == category),
        key=lambda each: (each.expected.estimate, -each.k),
    )
