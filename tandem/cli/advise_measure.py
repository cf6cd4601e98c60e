"""What `tandem advise` asks a gateway, in which order, and what it predicts in between.

1. One request at a time: plain decoding and every drafter with the largest k, prompt by prompt; a few with a small k,
   since a model drafts as many tokens as it is asked for, and the times of shorter rounds are not seen otherwise.
2. The best drafter is known now. With several requests at once: plain decoding, and that drafter with two k, for times.
3. Predictions for every k, and what they would choose.
4. Checks, measured after that: the choice, another k, and the gateway's own choosing, beside plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rich.progress import Progress

from tandem.advise.answers import Answer, answers_of, tokens_per_round
from tandem.advise.predict import Prediction, Profile, measured_speedup, predict, profiles, rate_of
from tandem.advise.study import ALL, Check, Load, best_of
from tandem.advise.times import times_together
from tandem.advise.verdict import second_k
from tandem.bench.arms import Arm
from tandem.bench.plan import Group, plan_groups
from tandem.bench.session import Failure, Records, Session
from tandem.bench.workload import Workload
from tandem.errors import InvalidRequest, Unavailable

_SMALL: Final = 3  # k of the probes, whose times lie between those of plain rounds and of long ones
_MOST_TOGETHER: Final = 8  # k with several requests at once: there a long draft of each makes the forward very long
_PLAIN: Final = Arm(name="off", speculation={"enabled": False, "trace": True})


@dataclass(slots=True)
class Measuring:
    """Runs groups, and keeps what failed in them."""

    session: Session
    progress: Progress
    failures: list[Failure] = field(default_factory=list)

    async def run(self, words: str, groups: Sequence[Group]) -> Records:
        """Measured, with a bar called `words`. Raises Unavailable where no request was answered."""
        task = self.progress.add_task(words, total=sum(len(group.prompts) * len(group.arms) for group in groups))
        records = await self.session.measure(groups, in_time=lambda: True, done=lambda: self.progress.advance(task))
        self.failures += records.failures
        if not records.observations:
            raise Unavailable(f"no request was answered: {records.failures[0].message}")
        return records

    async def warm_up(self, groups: Sequence[Group]) -> None:
        """Asked, and nothing kept. Raises TandemError at the first failure."""
        task = self.progress.add_task("warm-up", total=sum(len(group.prompts) * len(group.arms) for group in groups))
        await self.session.warm_up(groups, done=lambda: self.progress.advance(task))


async def measure(
    bench: Measuring, workload: Workload, drafters: Sequence[str], most: int, levels: Sequence[int]
) -> tuple[list[Load], list[Profile], list[Prediction]]:
    """Steps 1 to 3: plain decoding at every load, each drafter on each category, and every prediction."""
    arms = {drafter: _arm(drafter, most) for drafter in drafters}
    groups = plan_groups(workload, (_PLAIN, *arms.values()), levels=(1,), repeats=1)
    await bench.warm_up(groups[:1])
    records = await bench.run("one at a time", groups)
    plain = answers_of(records.observations, _PLAIN.name)
    if not any(answer.rounds for answer in plain):
        raise Unavailable(
            "no answer tells its rounds: they are all of one token, or the gateway is older than this command"
        )
    probed = Records(num_groups=0)
    probes = {drafter: _arm(drafter, _SMALL) for drafter in drafters if most > _SMALL}
    if probes:
        some = plan_groups(workload.per_category(1), tuple(probes.values()), levels=(1,), repeats=1)
        probed = await bench.run("small drafts", some)
    found: list[Profile] = []
    predictions: list[Prediction] = []
    for drafter, arm in arms.items():
        own_probes = answers_of(probed.observations, probes[drafter].name) if probes else []
        own = profiles(
            drafter,
            answers_of(records.observations, arm.name),
            plain,
            asked=most,
            probes=own_probes,
            categories=workload.categories,
            all_name=ALL,
        )
        times_of = {name: profile.times for name, profile in own.items()}
        for category, profile in own.items():
            rate = rate_of([each for each in plain if category in (ALL, each.category)])
            if rate is None or not profile.answers:
                raise InvalidRequest(
                    f"no answer to {category} has a second token: there is nothing to speed up", param="workload"
                )
            found.append(profile)
            predictions += [
                predict(profile, k=k, concurrency=1, times_of=times_of, plain_tokens_per_second=rate)
                for k in range(1, most + 1)
            ]
    best = best_of(predictions, concurrency=1)
    whole = next(each for each in found if each.drafter == best.drafter and each.category == ALL)
    loads = [_load(1, records, plain)]
    for level in levels:
        if level > 1:
            load, more = await _together(bench, workload, whole, level)
            loads.append(load)
            predictions += more
    return loads, found, predictions


async def _together(
    bench: Measuring, workload: Workload, profile: Profile, level: int
) -> tuple[Load, list[Prediction]]:
    """Times with `level` requests at once, and predictions from them."""
    lengths = sorted({min(_SMALL, profile.asked), min(_MOST_TOGETHER, profile.asked)})
    arms = [_arm(profile.drafter, k) for k in lengths]
    groups = plan_groups(_mixed(workload), (_PLAIN, *arms), levels=(level,), repeats=1)
    records = await bench.run(f"{level} at once", groups)
    plain = answers_of(records.observations, _PLAIN.name)
    drafted = [answers_of(records.observations, arm.name) for arm in arms]
    rate = rate_of(plain)
    if rate is None or not any(drafted):
        raise Unavailable(f"no answers with {level} at once: {bench.failures[-1].message if bench.failures else ''}")
    times = times_together(drafted, plain, most=profile.asked)
    everywhere = dict.fromkeys(workload.categories, times)
    return _load(level, records, plain), [
        predict(profile, k=k, concurrency=level, times_of=everywhere, plain_tokens_per_second=rate)
        for k in range(1, profile.asked + 1)
    ]


async def check(
    bench: Measuring, workload: Workload, predictions: Sequence[Prediction], most: int, levels: Sequence[int]
) -> list[Check]:
    """Step 4: what the predictions would choose, measured; without traces, as users would ask."""
    plain = Arm(name="off", speculation={"enabled": False})
    checks: list[Check] = []
    for level in sorted({1, *levels}):
        best = best_of(predictions, concurrency=level)
        lengths = [best.k] if level > 1 else list(dict.fromkeys((best.k, second_k(best.k, most=most))))
        arms: dict[int | None, Arm] = {k: _arm(best.drafter, k, trace=False) for k in lengths}
        arms[None] = Arm(name="auto", speculation={"num_draft_tokens": "auto", "drafter": best.drafter})
        asked = workload if level == 1 else _mixed(workload)
        groups = plan_groups(asked, (plain, *arms.values()), levels=(level,), repeats=1)
        records = await bench.run(f"checking, {level} at once", groups)
        baseline = answers_of(records.observations, plain.name)
        for category in (*asked.categories, ALL) if level == 1 and len(asked.categories) > 1 else (ALL,):
            for k, arm in arms.items():
                answers = _of(category, answers_of(records.observations, arm.name))
                measured = measured_speedup(answers, _of(category, baseline))
                if measured is not None:
                    predicted = _predicted(predictions, best.drafter, level, category, k)
                    checks.append(
                        Check(
                            drafter=best.drafter,
                            concurrency=level,
                            category=category,
                            k=k,
                            predicted=None if predicted is None else predicted.expected,
                            measured=measured,
                            predicted_tokens=None if predicted is None else predicted.tokens_per_round,
                            measured_tokens=tokens_per_round(answers),
                        )
                    )
    return checks


def _predicted(
    predictions: Sequence[Prediction], drafter: str, level: int, category: str, k: int | None
) -> Prediction | None:
    wanted = (drafter, level, category, k)
    return next((p for p in predictions if (p.drafter, p.concurrency, p.category, p.k) == wanted), None)


def _of(category: str, answers: Sequence[Answer]) -> list[Answer]:
    return [each for each in answers if category in (ALL, each.category)]


def _arm(drafter: str, k: int, *, trace: bool = True) -> Arm:
    # A drafter may have any name, and an arm's name is only for looking up.
    return Arm(
        name=f"{drafter}/{k}",
        speculation={"num_draft_tokens": k, "drafter": drafter} | ({"trace": True} if trace else {}),
    )


def _mixed(workload: Workload) -> Workload:
    """All categories as one, in turn: requests that come at once are of all kinds."""
    ordered = [
        prompt
        for place in range(len(workload.prompts))
        for category in workload.categories
        for prompt in [each for each in workload.prompts if each.category == category][place : place + 1]
    ]
    return replace(workload, prompts=tuple(replace(prompt, category=ALL) for prompt in ordered))


def _load(level: int, records: Records, plain: Sequence[Answer]) -> Load:
    runs = [run for run in records.runs if run.arm == _PLAIN.name]
    return Load(
        concurrency=level,
        tokens_per_second=rate_of(plain) or 0.0,
        total_tokens_per_second=sum(run.num_tokens for run in runs) / max(1e-9, sum(run.seconds for run in runs)),
    )
