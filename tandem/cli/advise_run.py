"""`tandem advise`, from its options to its exit code: what is asked, in which order, and what is made of it.

1. One request at a time: plain decoding and every drafter with the largest k, prompt by prompt; a few with a small k,
   since a model drafts as many tokens as it is asked for, and the times of shorter rounds are not seen otherwise.
2. The best drafter is known now. With several requests at once: plain decoding, and that drafter with two k, for times.
3. Predictions for every k, and what they would choose.
4. Checks, measured after that: the choice, another k, and the gateway's own choosing, beside plain decoding.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tandem.advise.answers import Answer, answers_of
from tandem.advise.page import page
from tandem.advise.predict import Prediction, Profile, measured_speedup, predict, profiles, rate_of
from tandem.advise.report import document
from tandem.advise.study import ALL, Check, Load, Study, best_of
from tandem.advise.tables import print_study
from tandem.advise.times import times_together
from tandem.advise.verdict import choose, second_k
from tandem.bench.arms import Arm
from tandem.bench.client import BenchClient
from tandem.bench.machine import describe_machine
from tandem.bench.plan import Group, Sampling, plan_groups
from tandem.bench.processes import Processes
from tandem.bench.report import Served
from tandem.bench.session import Failure, Records, Session
from tandem.bench.workload import Workload, load_workload, own_workload
from tandem.cli.bench_up import on_free_ports, started_with, with_services
from tandem.cli.chat_client import ChatClient
from tandem.cli.console import printable, stderr_console, stdout_console
from tandem.cli.fetching import fetch_with_bar
from tandem.cli.plan import UpOptions
from tandem.errors import InvalidRequest, Unavailable
from tandem.models.bundled import default_cache_dir

_SMALL: Final = 3  # k of the probes, whose times lie between those of plain rounds and of long ones
_MOST_TOGETHER: Final = 8  # k with several requests at once: there a long draft of each makes the forward very long
_PLAIN: Final = Arm(name="off", speculation={"enabled": False, "trace": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions:
    """What the command line asks for. `up`: services are started for the run, and `url` does not count."""

    url: str
    up: UpOptions | None
    workload: Path | None
    drafters: tuple[str, ...]
    most: int
    per_category: int
    sample_seed: int | None
    levels: tuple[int, ...]
    sampling: Sampling
    json_file: Path | None
    html_file: Path | None


@dataclass(slots=True)
class _Bench:
    """Runs groups, and keeps what failed in them."""

    session: Session
    progress: Progress
    failures: list[Failure] = field(default_factory=list)

    async def run(self, words: str, groups: Sequence[Group]) -> Records:
        task = self.progress.add_task(words, total=sum(len(group.prompts) * len(group.arms) for group in groups))
        records = await self.session.measure(groups, in_time=lambda: True, done=lambda: self.progress.advance(task))
        self.failures += records.failures
        if not records.observations:
            raise Unavailable(f"no request was answered: {records.failures[0].message}")
        return records

    async def warm_up(self, groups: Sequence[Group]) -> None:
        task = self.progress.add_task("warm-up", total=sum(len(group.prompts) * len(group.arms) for group in groups))
        await self.session.warm_up(groups, done=lambda: self.progress.advance(task))


def run_advise(options: AdviseOptions, environment: Mapping[str, str], *, api_key: str | None) -> int:
    """Measure, print, write; 0 where no request failed. Raises TandemError where nothing could be measured."""
    console = stderr_console()
    for file in (options.json_file, options.html_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidRequest(f"the folder of {file} does not exist: make it first")  # not after all the waiting
    workload = own_workload() if options.workload is None else load_workload(options.workload)
    workload = workload.first_turns(1).per_category(options.per_category, sample_seed=options.sample_seed)
    if options.up is None:
        with ChatClient(options.url, api_key=api_key) as client:
            url = client.url
        study = asyncio.run(_advise(options, workload, url, environment, api_key, console))
    else:
        up = on_free_ports(options.up)
        if up.bundled_model_used:
            fetch_with_bar(default_cache_dir(), console)
        options = replace(options, up=up)
        study = asyncio.run(
            with_services(
                up, environment, console, lambda: _advise(options, workload, up.url, environment, api_key, console)
            )
        )
    print_study(study, stdout_console())
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(document(study), indent=1) + "\n", encoding="utf-8")
    if options.html_file is not None:
        options.html_file.write_text(page(study), encoding="utf-8")
    return 1 if study.failures else 0


async def _advise(
    options: AdviseOptions,
    workload: Workload,
    url: str,
    environment: Mapping[str, str],
    api_key: str | None,
    console: Console,
) -> Study:
    machine = describe_machine(environment)
    began, started = time.monotonic(), datetime.now().astimezone().isoformat(timespec="seconds")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with (
        BenchClient(url, api_key=api_key, concurrency=max(1, *options.levels)) as client,
        Processes({"gateway": f"{url}/metrics"}, api_keys={"gateway": api_key} if api_key else {}) as processes,
    ):
        model = await client.model()
        status, reasons = await client.readiness()
        if reasons:
            console.print(Text(f"the gateway is {status}: {printable('; '.join(reasons))}", "yellow"), soft_wrap=True)
        drafters, most = _offer(model, options)
        served = Served(
            url=url,
            model=model,
            status=status,
            reasons=reasons,
            builds=await processes.builds(required=()),
            started_with=None if options.up is None else started_with(options.up),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            # Prompts go as they are: the answers of all arms are then the same text, where they are greedy, and
            # prefills, which a prefix cache shortens, are no part of any figure here.
            bench = _Bench(Session(client, processes, options.sampling, tickets=None), progress)
            loads, found, predictions = await _measured(bench, workload, drafters, most, options.levels)
            checks = await _checked(bench, workload, predictions, most, options.levels)
    return Study(
        began=started,
        seconds=time.monotonic() - began,
        machine=machine,
        served=served,
        workload=workload,
        sampling=options.sampling,
        most=most,
        loads=tuple(loads),
        profiles=tuple(found),
        predictions=tuple(predictions),
        checks=tuple(checks),
        choices=choose(predictions, checks),
        failures=tuple(bench.failures),
    )


def _offer(model: Mapping[str, Any], options: AdviseOptions) -> tuple[tuple[str, ...], int]:
    """The drafters to look at, and the largest k. Raises Unavailable where there is nothing to draft with."""
    offer = model.get("speculation") or {}
    there = tuple(map(str, offer.get("drafters") or ()))
    if not there:
        raise Unavailable("the gateway has no draft service now: there is nothing to compare plain decoding with")
    if set(there) == {"auto", "ngram"}:
        there = ("ngram",)  # auto has nothing else to choose
    for name in options.drafters:
        if name not in (*there, "auto"):
            raise InvalidRequest(f"--drafter {name[:64]!r}: there are {', '.join(there)}", param="drafter")
    return options.drafters or there, min(options.most, int(offer.get("max_num_draft_tokens") or options.most))


async def _measured(
    bench: _Bench, workload: Workload, drafters: Sequence[str], most: int, levels: Sequence[int]
) -> tuple[list[Load], list[Profile], list[Prediction]]:
    arms = {drafter: _arm(drafter, most) for drafter in drafters}
    groups = plan_groups(workload, (_PLAIN, *arms.values()), levels=(1,), repeats=1)
    await bench.warm_up(groups[:1])
    records = await bench.run("one at a time", groups)
    plain = answers_of(records.observations, _PLAIN.name)
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
                raise InvalidRequest("no answer has a second token: there is nothing to speed up", param="workload")
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


async def _together(bench: _Bench, workload: Workload, profile: Profile, level: int) -> tuple[Load, list[Prediction]]:
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


async def _checked(
    bench: _Bench, workload: Workload, predictions: Sequence[Prediction], most: int, levels: Sequence[int]
) -> list[Check]:
    """What the predictions would choose, measured; without traces, as users would ask."""
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
                    checks.append(
                        Check(
                            drafter=best.drafter,
                            concurrency=level,
                            category=category,
                            k=k,
                            predicted=_expected(predictions, best.drafter, level, category, k),
                            measured=measured,
                        )
                    )
    return checks


def _expected(predictions: Sequence[Prediction], drafter: str, level: int, category: str, k: int | None) -> Any:
    wanted = (drafter, level, category, k)
    return next((p.expected for p in predictions if (p.drafter, p.concurrency, p.category, p.k) == wanted), None)


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
