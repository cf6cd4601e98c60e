"""`tandem bench`: the command's words. What it does is in bench_run.py, imported when it runs."""

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


def bench(
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
    metrics_url: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=URL of a service's metrics, for CPU time and memory; may be repeated. --up knows its own.",
            show_default=False,
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines: Spec-Bench, or with a prompt or messages each. (default: a small set of our own)",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    per_category: Annotated[
        int | None, typer.Option(min=1, help="Only the first N prompts of each category. (default: all)")
    ] = None,
    sample_seed: Annotated[
        int | None, typer.Option(min=0, help="Instead of the first N, so many at random, by this seed.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation that are asked, one after another.")] = 1,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="What is compared with plain decoding: NAME=JSON, a request's `speculation`; may be repeated. "
            "(default: on={})",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once; several with commas, as in 1,4,8.")] = "1",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Of all requests. (default: none is sent)", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Ask everything so many times.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, max=100, help="Groups before the first that counts.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, help="Begin no new group of requests after this time. (default: no limit)"),
    ] = None,
    shared_prefix: Annotated[
        bool,
        typer.Option(
            "--shared-prefix",
            help="Send prompts as they are: an arm may find the prefill of another in the services' caches.",
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures to this file.", dir_okay=False, show_default=False)
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(help="Draw them into this file, .svg or .png.", dir_okay=False, show_default=False),
    ] = None,
) -> None:
    """Measure what speculation gains: the same prompts with it and without, in pairs, one right after the other.

    Exit code 1 where a request failed; what was measured is printed all the same. docs/benchmarking.md explains the
    figures.
    """
    from tandem.bench.plan import Sampling
    from tandem.cli.bench_run import BenchOptions, parse_levels, run_bench

    if sample_seed is not None and per_category is None:
        raise typer.BadParameter("--sample-seed goes with --per-category, which says how many")
    options = BenchOptions(
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
        metrics_urls=metrics_url or (),
        workload=workload,
        per_category=per_category,
        sample_seed=sample_seed,
        turns=turns,
        arms=arm or (),
        levels=parse_levels(concurrency),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed),
        repeats=repeats,
        warm_up_groups=warm_up,
        minutes=minutes,
        shared_prefix=shared_prefix,
        json_file=json,
        chart_file=chart,
    )
    raise typer.Exit(run_bench(options, os.environ, api_key=api_key))
