"""`tandem distill`: the command's words. What it does is in tandem/distill, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Stage = Literal["answers", "draft"]


def distill(
    *,
    model: Annotated[
        str, typer.Option(help="The target: `bundled`, a Hugging Face folder, hub id or .gguf file.")
    ] = "bundled",
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the work; a run that was ended goes on there. (default: in the cache, by the model's name)",
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Your own prompts, in the forms that `tandem bench --workload` takes.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    only_own_prompts: Annotated[
        bool, typer.Option("--only-own-prompts", help="None of the built-in ones beside them.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens to generate.")] = 1_500_000,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Answers generated at once.")] = 32,
    top: Annotated[int, typer.Option(min=1, max=256, help="Likeliest tokens kept of each law.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the built-in prompts.")] = 0,
    until: Annotated[
        Stage, typer.Option(help="End after this stage; the same command without it goes on.")
    ] = "draft",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. (default: all cores)", show_default=False)
    ] = None,
) -> None:
    """Train a small draft for a target, from the target's own answers. Ended at any time, it goes on when run again.

    docs/distilling.md is the recipe.
    """
    from tandem.cli.cores import available_cores
    from tandem.cli.distill_run import run
    from tandem.distill.answers import GenerationSettings
    from tandem.distill.run import DistillOptions, default_work_folder
    from tandem.settings import EngineSettings

    if only_own_prompts and prompts is None:
        raise typer.BadParameter("--only-own-prompts goes with --prompts")
    options = DistillOptions(
        model=model,
        work=work or default_work_folder(model),
        prompts=prompts,
        only_own_prompts=only_own_prompts,
        seed=seed,
        until=until,
        generation=GenerationSettings(num_answer_tokens=tokens, batch_size=batch_size, top=top),
        engine=EngineSettings(device=device, threads=threads or available_cores()),
    )
    raise typer.Exit(run(options))
