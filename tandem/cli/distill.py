"""`tandem distill`: the command's words. What it does is in tandem/distill, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Stage = Literal["answers", "ngrams", "head", "draft"]


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
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the draft, written whole at the end. (default: `draft` in the work folder)",
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    ngrams: Annotated[
        Path | None,
        typer.Option(
            help="File of the n-grams of the answers, a draft without a model. (default: in the work folder)",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(
            help="File of the draft head, which reads the target's own states. (default: in the work folder)",
            dir_okay=False,
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
    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft: the target's first ones and its last.")] = 3,
    from_layers: Annotated[
        str | None,
        typer.Option(help="Instead: which of the target's layers it starts from, as in 0,1,29.", show_default=False),
    ] = None,
    vocab: Annotated[
        int, typer.Option(min=16, help="Tokens that the draft can say: those that the target says most.")
    ] = 16_384,
    epochs: Annotated[float, typer.Option(min=0.01, help="How often the answers are gone through.")] = 4.0,
    batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens a training step, padding included.")] = 4096,
    learning_rate: Annotated[float, typer.Option(min=1e-6, max=1.0, help="The highest.")] = 2e-3,
    overlap: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the loss that is the acceptance itself, not the divergence."),
    ] = 0.0,
    head_vocab: Annotated[int, typer.Option(min=16, help="Tokens that the draft head can say.")] = 8192,
    head_inner: Annotated[int, typer.Option(min=1, help="Width of its gated layer.")] = 1024,
    head_tokens: Annotated[
        int, typer.Option(min=1, help="Answer tokens that it learns from; their states take room on the disk.")
    ] = 2_000_000,
    head_epochs: Annotated[float, typer.Option(min=0.01, help="How often it goes through them.")] = 4.0,
    head_overlap: Annotated[float, typer.Option(min=0.0, max=1.0, help="As --overlap, of its training.")] = 0.3,
    evaluations: Annotated[int, typer.Option(min=1, help="Looks at the acceptance, over the whole training.")] = 20,
    patience: Annotated[int, typer.Option(min=1, help="Looks without a better one that end the training.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the built-in prompts, and of the training.")] = 0,
    until: Annotated[Stage, typer.Option(help="End after this stage; the same command without it goes on.")] = "draft",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. (default: all cores)", show_default=False)
    ] = None,
    kv_cache_gib: Annotated[
        float, typer.Option(min=0.01, help="Memory for the answers under way; it bounds how many there are.")
    ] = 1.0,
) -> None:
    """Train a draft head and a small draft for a target, from its own answers. Ended, it goes on when run again.

    docs/distilling.md is the recipe.
    """
    from tandem.cli.cores import available_cores
    from tandem.cli.distill_run import run
    from tandem.distill.answers import GenerationSettings
    from tandem.distill.head import HeadSettings
    from tandem.distill.run import DistillOptions, default_work_folder
    from tandem.distill.training import TrainingSettings
    from tandem.settings import EngineSettings

    if only_own_prompts and prompts is None:
        raise typer.BadParameter("--only-own-prompts goes with --prompts")
    folder = work or default_work_folder(model)
    options = DistillOptions(
        model=model,
        work=folder,
        out=out or folder / "draft",
        ngrams=ngrams or folder / "ngrams.safetensors",
        head=head or folder / "head.safetensors",
        prompts=prompts,
        only_own_prompts=only_own_prompts,
        seed=seed,
        until=until,
        num_layers=layers,
        generation=GenerationSettings(num_answer_tokens=tokens, batch_size=batch_size, top=top),
        head_training=HeadSettings(
            vocabulary=head_vocab,
            inner=head_inner,
            most_tokens=head_tokens,
            epochs=head_epochs,
            overlap=head_overlap,
            seed=seed,
        ),
        training=TrainingSettings(
            layers=_parse_layers(from_layers),
            vocabulary=vocab,
            epochs=epochs,
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
            weight_decay=0.01,
            overlap=overlap,
            evaluations=evaluations,
            patience=patience,
            seed=seed,
        ),
        engine=EngineSettings(
            device=device,
            threads=threads or available_cores(),
            kv_cache_bytes=round(kv_cache_gib * 2**30),
            fixed_step_bytes=0,  # its batches are larger than any fixed size
        ),
    )
    raise typer.Exit(run(options))


def _parse_layers(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"--from-layers must be numbers with commas between, as in 0,1,29, not {text}"
        ) from None
