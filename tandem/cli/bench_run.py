"""`tandem bench`, from its options to its exit code."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from tandem.bench.arms import Arm, chosen_arms
from tandem.bench.chart import check_chart, draw
from tandem.bench.client import BenchClient
from tandem.bench.machine import describe_machine
from tandem.bench.plan import Group, Sampling, plan_groups, tickets
from tandem.bench.processes import Processes, parse_metrics_urls
from tandem.bench.report import Report, Served
from tandem.bench.session import Records, Session
from tandem.bench.summary import summarise
from tandem.bench.tables import print_report
from tandem.bench.workload import Workload, load_workload, own_workload
from tandem.cli.bench_up import metrics_pages, on_free_ports, started_with, with_services
from tandem.cli.chat_client import ChatClient
from tandem.cli.console import printable, stderr_console, stdout_console
from tandem.cli.fetching import fetch_with_bar
from tandem.cli.plan import UpOptions
from tandem.errors import InvalidRequest
from tandem.models.bundled import default_cache_dir

_MAX_LEVEL: Final = 256
_MAX_LEVELS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the command line asks for. `up`: services are started for the run, and `url` does not count."""

    url: str
    up: UpOptions | None
    metrics_urls: Sequence[str]
    workload: Path | None
    per_category: int | None
    sample_seed: int | None
    turns: int
    arms: Sequence[str]
    levels: tuple[int, ...]
    sampling: Sampling
    repeats: int
    warm_up_groups: int
    minutes: float | None
    shared_prefix: bool
    json_file: Path | None
    chart_file: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The options, read and checked: what a run needs, and nothing that can still be wrong before it."""

    options: BenchOptions
    url: str
    api_key: str | None
    arms: tuple[Arm, ...]
    workload: Workload
    groups: list[Group]
    metrics_urls: Mapping[str, str]
    named_metrics: frozenset[str]  # those that the user named, and which therefore must answer
    environment: Mapping[str, str]


def parse_levels(words: str) -> tuple[int, ...]:
    """`1,4,8`. Raises InvalidRequest."""
    levels = [int(word) if word.strip().isdecimal() else 0 for word in words.split(",")]
    if not all(1 <= level <= _MAX_LEVEL for level in levels) or not 1 <= len(set(levels)) == len(levels) <= _MAX_LEVELS:
        raise InvalidRequest(
            f"--concurrency {words[:80]!r}: write up to {_MAX_LEVELS} different numbers from 1 to {_MAX_LEVEL}, "
            "as in 1,4,8",
            param="concurrency",
        )
    return tuple(sorted(levels))


def run_bench(options: BenchOptions, environment: Mapping[str, str], *, api_key: str | None) -> int:
    """Measure, print, write; 0 where no request failed. Raises TandemError where nothing could be measured."""
    console = stderr_console()
    for file in (options.json_file, options.chart_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidRequest(f"the folder of {file} does not exist: make it first")  # not after all the waiting
    if options.chart_file is not None:
        check_chart(options.chart_file)
    up = None if options.up is None else on_free_ports(options.up)
    job = _job(replace(options, up=up), environment, api_key)
    if up is None:
        report = asyncio.run(_bench(job, console))
    else:
        if up.bundled_model_used:
            fetch_with_bar(default_cache_dir(), console)
        report = asyncio.run(with_services(up, environment, console, lambda: _bench(job, console)))
    print_report(report, stdout_console())
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report.document(), indent=1) + "\n", encoding="utf-8")
    if options.chart_file is not None:
        draw(report, options.chart_file)
    return 0 if report.passed else 1


def _job(options: BenchOptions, environment: Mapping[str, str], api_key: str | None) -> _Job:
    arms = chosen_arms(options.arms)
    workload = (own_workload() if options.workload is None else load_workload(options.workload)).first_turns(
        options.turns
    )
    if options.per_category is not None:
        workload = workload.per_category(options.per_category, sample_seed=options.sample_seed)
    with ChatClient(options.url if options.up is None else options.up.url, api_key=api_key) as client:
        url = client.url
    own_pages = {} if options.up is None else metrics_pages(options.up)
    named_pages = parse_metrics_urls(options.metrics_urls)
    return _Job(
        options=options,
        url=url,
        api_key=api_key,
        arms=arms,
        workload=workload,
        groups=plan_groups(workload, arms, levels=options.levels, repeats=options.repeats),
        metrics_urls={"gateway": f"{url}/metrics", **own_pages, **named_pages},
        named_metrics=frozenset(named_pages),
        environment=environment,
    )


async def _bench(job: _Job, console: Console) -> Report:
    options = job.options
    machine = describe_machine(job.environment)
    began, started = time.monotonic(), datetime.now().astimezone().isoformat(timespec="seconds")
    async with (
        BenchClient(job.url, api_key=job.api_key, concurrency=max(options.levels)) as client,
        Processes(job.metrics_urls, api_keys=_metrics_keys(job)) as processes,
    ):
        model = await client.model()
        status, reasons = await client.readiness()
        if reasons:
            console.print(Text(f"the gateway is {status}: {printable('; '.join(reasons))}", "yellow"), soft_wrap=True)
        served = Served(
            url=job.url,
            model=model,
            status=status,
            reasons=reasons,
            builds=await processes.builds(required=job.named_metrics),
            started_with=None if options.up is None else started_with(options.up),
        )
        session = Session(
            client,
            processes,
            options.sampling,
            # Other lines in every run: the services may remember those of an earlier one.
            tickets=None if options.shared_prefix else tickets(secrets.randbelow(10**9)),
        )
        records = await _measured(job, session, console)
    return Report(
        began=started,
        seconds=time.monotonic() - began,
        machine=machine,
        served=served,
        arms=job.arms,
        workload=job.workload,
        sampling=options.sampling,
        levels=options.levels,
        repeats=options.repeats,
        shared_prefix=options.shared_prefix,
        records=records,
        lines=summarise(records, arms=[arm.name for arm in job.arms], categories=job.workload.categories),
    )


async def _measured(job: _Job, session: Session, console: Console) -> Records:
    """Warmed up, then measured, with a bar for both."""
    options = job.options
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        warm_up = [
            group
            for level in options.levels
            for group in itertools.islice(
                (group for group in job.groups if group.concurrency == level), options.warm_up_groups
            )
        ]
        await session.warm_up(warm_up, done=_bar(progress, "warm-up", warm_up))
        end = None if options.minutes is None else time.monotonic() + 60.0 * options.minutes
        return await session.measure(
            job.groups,
            in_time=lambda: end is None or time.monotonic() < end,
            done=_bar(progress, "measuring", job.groups),
        )


def _bar(progress: Progress, words: str, groups: Sequence[Group]) -> Callable[[], None]:
    """A new bar; call what comes back for each conversation that is done."""
    task = progress.add_task(words, total=sum(len(group.prompts) * len(group.arms) for group in groups))
    return lambda: progress.advance(task)


def _metrics_keys(job: _Job) -> dict[str, str]:
    """The gateway's own page wants the key that the gateway wants; a page that the user named is not given it."""
    return {"gateway": job.api_key} if job.api_key and "gateway" not in job.named_metrics else {}
