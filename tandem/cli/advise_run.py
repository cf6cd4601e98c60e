"""`tandem advise`, from its options to its exit code."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tandem.advise.page import page
from tandem.advise.report import document
from tandem.advise.study import Study
from tandem.advise.tables import print_study
from tandem.advise.verdict import choose
from tandem.bench.client import BenchClient
from tandem.bench.machine import describe_machine
from tandem.bench.plan import Sampling
from tandem.bench.processes import Processes
from tandem.bench.report import Served
from tandem.bench.session import Session
from tandem.bench.workload import Workload, load_workload, own_workload
from tandem.cli.advise_measure import Measuring, check, measure
from tandem.cli.bench_up import on_free_ports, started_with, with_services
from tandem.cli.chat_client import ChatClient
from tandem.cli.console import printable, stderr_console, stdout_console
from tandem.cli.fetching import fetch_with_bar
from tandem.cli.plan import UpOptions
from tandem.errors import InvalidRequest, Unavailable
from tandem.models.bundled import default_cache_dir


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
            bench = Measuring(Session(client, processes, options.sampling, tickets=None), progress)
            loads, found, predictions = await measure(bench, workload, drafters, most, options.levels)
            checks = await check(bench, workload, predictions, most, options.levels)
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
