"""A pair of models that is a few numbers: what `tandem advise` would have measured of it, at any k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.advise.answers import Answer, tokens_per_round
from tandem.advise.predict import Prediction, Profile, measured_speedup, predict, profiles, rate_of
from tandem.advise.study import ALL, Check, Load, Study
from tandem.advise.verdict import choose, second_k
from tandem.bench.plan import Sampling
from tandem.bench.report import Served
from tandem.bench.timeline import RoundTrace
from tandem.bench.workload import Prompt, Workload

MOST = 8
PLAIN_SECONDS, NETWORK_SECONDS, REST_SECONDS = 0.010, 0.0004, 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Each token is accepted with its category's probability; times are straight lines, with 3 % of noise."""

    rates: Mapping[str, float]
    draft_token_seconds: float = 0.001
    verify_slope_seconds: float = 0.0004  # for each drafted token
    hit_rate: float = 0.0
    num_prompts: int = 6
    num_tokens: int = 120

    @property
    def workload(self) -> Workload:
        prompts = [
            Prompt(name=f"{c}:{i}", category=c, turns=("?",)) for c in self.rates for i in range(self.num_prompts)
        ]
        return Workload(name="made up", prompts=tuple(prompts))

    def answers(self, k: int, *, seed: int = 0) -> list[Answer]:
        """All prompts, drafted with k; 0: plain decoding."""
        rng = np.random.default_rng((seed, k))
        return [self._answer(prompt, k, rng) for prompt in self.workload.prompts]

    def _answer(self, prompt: Prompt, k: int, rng: np.random.Generator) -> Answer:
        rounds: list[RoundTrace] = []
        left, seconds = self.num_tokens, 0.0
        while left > 0:
            drafted = min(k, left - 1)
            accepted = min(drafted, int(rng.geometric(1.0 - self.rates[prompt.category])) - 1) if drafted else 0
            noise = 1.0 + 0.03 * rng.standard_normal()
            prepared = bool(drafted and rng.random() < self.hit_rate)
            verify = noise * (PLAIN_SECONDS + drafted * self.verify_slope_seconds)
            draft = 0.0 if prepared else drafted * self.draft_token_seconds
            network = NETWORK_SECONDS * (2.0 if k else 1.0)
            rounds.append(
                RoundTrace(
                    prefill=False,
                    drafted=drafted,
                    accepted=accepted,
                    prepared=prepared,
                    draft_seconds=draft,
                    verify_seconds=verify,
                    network_seconds=network,
                )
            )
            seconds += verify + draft + network + REST_SECONDS
            left -= accepted + 1
        return Answer(
            key=(prompt.name, 0, 0),
            category=prompt.category,
            num_tokens=self.num_tokens,
            num_rounds=len(rounds),
            seconds=seconds,
            rounds=tuple(rounds),
            bytes_sent=500 * len(rounds) if k else 0,
        )


def study_of(pairs: Mapping[str, Pair], *, levels: Sequence[int] = (1, 4)) -> Study:
    """What a run would find of drafters that are such pairs, on the first one's prompts."""
    first = next(iter(pairs.values()))
    plain = first.answers(0)
    found: list[Profile] = []
    predictions: list[Prediction] = []
    for name, pair in pairs.items():
        own = profiles(
            name,
            pair.answers(MOST),
            plain,
            asked=MOST,
            probes=pair.answers(3, seed=9),
            categories=first.workload.categories,
            all_name=ALL,
        )
        times_of = {category: profile.times for category, profile in own.items()}
        found += own.values()
        for level in levels:
            predictions += [
                predict(
                    profile, k=k, concurrency=level, times_of=times_of, plain_tokens_per_second=(rate_of(plain) or 0.0)
                )
                for profile in (own.values() if level == 1 else [own[ALL]])
                for k in range(1, MOST + 1)
            ]
    best = max((p for p in predictions if p.category == ALL), key=lambda each: each.expected.estimate)
    checks: list[Check] = []
    for k in (best.k, second_k(best.k, most=MOST)):
        drafted = pairs[best.drafter].answers(k, seed=1)
        for category in (*first.workload.categories, ALL):
            measured = measured_speedup([a for a in drafted if category in (ALL, a.category)], plain)
            predicted = next(
                p for p in predictions if (p.drafter, p.concurrency, p.category, p.k) == (best.drafter, 1, category, k)
            )
            assert measured is not None
            checks.append(
                Check(
                    drafter=best.drafter,
                    concurrency=1,
                    category=category,
                    k=k,
                    predicted=predicted.expected,
                    measured=measured,
                    predicted_tokens=predicted.tokens_per_round,
                    measured_tokens=tokens_per_round([a for a in drafted if category in (ALL, a.category)]),
                )
            )
    machine: dict[str, Any] = {
        "tandem": "0", "commit": None, "cpu": "none", "cpus": 2, "cpus_usable": 2, "memory_bytes": 2**30, "os": "none",
        "python": "3", "packages": {}, "threads": {}, "load_average": 0.0,
    }  # fmt: skip
    return Study(
        began="2026-01-01T00:00:00+00:00",
        seconds=60.0,
        machine=machine,
        served=Served(
            url="http://gateway",
            model={"id": "<made> & up"},
            status="ready",
            reasons=(),
            builds={},
            started_with=None,
        ),
        workload=first.workload,
        sampling=Sampling(max_tokens=121, temperature=0.0, seed=None),
        most=MOST,
        loads=tuple(
            Load(concurrency=level, tokens_per_second=90.0 / level**0.5, total_tokens_per_second=80.0 * level**0.5)
            for level in levels
        ),
        profiles=tuple(found),
        predictions=tuple(predictions),
        checks=tuple(checks),
        choices=choose(predictions, checks),
        failures=(),
    )
