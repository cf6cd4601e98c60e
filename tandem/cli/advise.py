"""`tandem advise`: the command's words. What it does is in advise_run.py, imported when it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.measured import (
    ApiKey,
    DraftHead,
    DraftLayers,
    DraftModel,
    DraftTable,
    Model,
    Threads,
    Up,
    Url,
    services_of_the_run,
)


def advise(
    workload: Annotated[
        Path | None,
        typer.Argument(
            help="Your prompts as JSON lines: a prompt, messages or turns each, and a category if you like; or what "
            "the gateway recorded. (default: a small set of our own)",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    *,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    up: Up = False,
    model: Model = "bundled",
    draft_model: DraftModel = None,
    draft_layers: DraftLayers = None,
    draft_table: DraftTable = None,
    draft_head: DraftHead = None,
    threads: Threads = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Only this drafter; may be repeated. (default: all there are)", show_default=False),
    ] = None,
    num_draft_tokens: Annotated[
        int, typer.Option(min=1, max=64, help="The largest k that is considered, as far as the gateway allows it.")
    ] = 16,
    per_category: Annotated[
        int, typer.Option(min=1, help="So many prompts of each category: the first, or a sample.")
    ] = 4,
    sample_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Instead of the first, prompts at random, by this seed.", show_default=False),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, besides one at a time, as in 4,8.")] = "4",
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Of your traffic. 0: the likeliest token.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Of all requests. (default: none is sent)", show_default=False)
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures to this file.", dir_okay=False, show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with pictures to this file.", dir_okay=False, show_default=False)
    ] = None,
) -> None:
    """Should your traffic be speculated for, with which draft, and how many tokens of it?

    Asks your prompts without speculation and with every drafter, predicts the speed for every number of draft tokens,
    checks that where it matters, and says in one paragraph what to do. Exit code 1 where a request failed.
    docs/choosing-a-draft.md explains it.
    """
    from tandem.bench.plan import Sampling
    from tandem.cli.advise_run import AdviseOptions, run_advise
    from tandem.cli.bench_run import parse_levels

    options = AdviseOptions(
        url=url,
        up=services_of_the_run(
            model=model,
            draft_model=draft_model,
            draft_layers=draft_layers,
            draft_table=draft_table,
            draft_head=draft_head,
            threads=threads,
            environment=os.environ,
        )
        if up
        else None,
        workload=workload,
        drafters=tuple(drafter or ()),
        most=num_draft_tokens,
        per_category=per_category,
        sample_seed=sample_seed,
        levels=parse_levels(concurrency),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed),
        json_file=json,
        html_file=html,
    )
    raise typer.Exit(run_advise(options, os.environ, api_key=api_key))
