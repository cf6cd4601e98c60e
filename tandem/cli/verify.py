"""`tandem verify`: does speculation change what running services say?"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tandem.cli.chat_client import ChatClient
from tandem.cli.console import printable, stderr_console, stdout_console
from tandem.errors import InvalidRequest, Unavailable
from tandem.verification.checks import law_lines, text_lines
from tandem.verification.plan import PARAMETER_SETS, ParameterSet, Plan, Stage
from tandem.verification.report import Report, print_report
from tandem.verification.sampler import KNOWN_DRAFTERS, Sample, Sampler

_CALIBRATIONS = 2  # the first finds tokens that are hardly ever said, the second how likely they have become


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What the command line asks for. No drafters: every one that the services have."""

    num_samples: int
    num_seeds: int
    minutes: float
    parameter_sets: Sequence[str]
    drafters: Sequence[str]
    concurrency: int
    base_seed: int
    allowed_ties: float
    allow_untested: bool
    json_file: Path | None


def run_verify(url: str, *, api_key: str | None, options: VerifyOptions) -> int:
    """Sample, judge, print, write; 0 where everything passed. Raises TandemError where the services do not answer."""
    sets = _chosen_sets(options.parameter_sets)
    with ChatClient(url, api_key=api_key) as client:
        url, model = client.url, printable(client.model_id())
    report = asyncio.run(_verify(url, api_key, model, options, sets, stderr_console()))
    print_report(report, stdout_console())
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report.document(), indent=1) + "\n")
    return 0 if report.passed else 1


def _chosen_sets(names: Sequence[str]) -> tuple[ParameterSet, ...]:
    known = {parameters.name: parameters for parameters in PARAMETER_SETS}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"there are no parameters {name!r}; there are {', '.join(known)}", param="parameters")
    return tuple(known[name] for name in dict.fromkeys(names)) or PARAMETER_SETS


async def _verify(
    url: str, api_key: str | None, model: str, options: VerifyOptions, sets: tuple[ParameterSet, ...], console: Console
) -> Report:
    began = time.monotonic()

    def in_time() -> bool:
        return time.monotonic() - began < 60.0 * options.minutes

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        async with Sampler(url, api_key=api_key, concurrency=options.concurrency) as sampler:
            plan = Plan(
                drafters=await _drafters(sampler, options.drafters),
                parameter_sets=sets,
                num_samples=options.num_samples,
                num_seeds=options.num_seeds,
                base_seed=options.base_seed,
            )
            opening = await sampler.pilot(plan.pilot(), done=_bar(progress, "pilot", plan.pilot_samples))
            stage = Stage.on(opening.prompt_ids, _spoken(opening.samples))
            for _ in range(_CALIBRATIONS):
                done = _bar(progress, "calibration", plan.pilot_samples)
                stage = stage.flattened(_spoken(await sampler.samples(plan.calibration(stage), done=done)))
            cases = plan.cases(stage)
            done = _bar(progress, "texts", len(cases) * len(plan.ways))
            texts = await sampler.samples(plan.case_requests(cases), done=done)
            done = _bar(progress, "laws", plan.num_samples * len(plan.arms))
            laws = await sampler.samples(plan.law_requests(stage, in_time=in_time), done=done)
    if not laws:
        raise Unavailable(f"not one law was sampled within {options.minutes:g} minutes: allow more with --minutes")
    return Report(
        url=url,
        model=model,
        base_seed=options.base_seed,
        num_samples=len(laws) // len(plan.arms),
        seconds=time.monotonic() - began,
        allowed_ties=options.allowed_ties,
        allow_untested=options.allow_untested,
        laws=tuple(law_lines(plan, laws)),
        texts=tuple(text_lines(plan, cases, texts, allowed_ties=options.allowed_ties)),
    )


async def _drafters(sampler: Sampler, wanted: Sequence[str]) -> tuple[str, ...]:
    """The drafters that are there, of those wanted or known. Raises InvalidRequest where one that is wanted is not."""
    probe = next(Plan(drafters=()).pilot())
    there = [name for name in dict.fromkeys(wanted or KNOWN_DRAFTERS) if await sampler.has_drafter(name, request=probe)]
    if missing := [name for name in wanted if name not in there]:
        raise InvalidRequest(f"the services have no drafter {missing[0]!r}", param="drafter")
    if not there:
        raise Unavailable(
            f"the services have none of the drafters {', '.join(KNOWN_DRAFTERS)}: name one with --drafter"
        )
    return tuple(there)


def _spoken(samples: Sequence[Sample]) -> list[int]:
    return [token_id for sample in samples for token_id in sample.token_ids]


def _bar(progress: Progress, words: str, total: int) -> Callable[[], None]:
    """A new bar; call what comes back for each request that is done."""
    task: TaskID = progress.add_task(words, total=total)
    return lambda: progress.advance(task)
