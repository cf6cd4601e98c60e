"""`tandem distill`, stage by stage. Each finds in the work folder how far it came, and goes on there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from tandem.distill.answers import LONGEST, GenerationSettings, Tally, generate
from tandem.distill.asked import Asked
from tandem.distill.chat import ModelTokenizer
from tandem.distill.dataset import coverage, likeliest_ids, read_examples, split
from tandem.distill.display import Display
from tandem.distill.evaluation import ALL, Acceptance, acceptance
from tandem.distill.head import HeadSettings
from tandem.distill.head_run import HeadStage
from tandem.distill.ngrams import hits, learn
from tandem.distill.optimizing import TrainingReport
from tandem.distill.own_prompts import own_prompts
from tandem.distill.starters.make import starters
from tandem.distill.student import Student, new_student, spread_layers
from tandem.distill.training import TrainingSettings, run_name, train
from tandem.distill.work_folder import WorkFolder
from tandem.distill.writing import Making, write_draft
from tandem.engine.factory import find_model, start_runner
from tandem.errors import InvalidRequest
from tandem.models.bundled import default_cache_dir, exclusive
from tandem.models.facts import end_token_ids_of
from tandem.models.loading import choose_device, choose_dtype, load_model
from tandem.models.locate import ModelFiles
from tandem.models.tokenizer_files import tokenizer_fingerprint, vocabulary
from tandem.ngram_table import Origin
from tandem.settings import EngineSettings

Stage = Literal["answers", "ngrams", "head", "draft"]
_LOCK: Final = ".lock"
_LOCK_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """What the command line asks for. `training.layers` may be empty: then `num_layers` of them, spread."""

    model: str
    work: Path
    out: Path
    ngrams: Path
    head: Path
    prompts: Path | None
    only_own_prompts: bool
    seed: int
    until: Stage
    num_layers: int
    generation: GenerationSettings
    head_training: HeadSettings
    training: TrainingSettings
    engine: EngineSettings


def default_work_folder(model: str) -> Path:
    """Where the work on a target's draft is kept unless the user says otherwise."""
    return default_cache_dir() / "distill" / "".join(c if c.isalnum() or c in "-._" else "-" for c in model)


def run_distill(options: DistillOptions, display: Display, stop: Callable[[], bool]) -> bool:
    """All stages that are not done yet, up to `until`; whether they are done now, which they are not after `stop`.

    Raises TandemError, saying what to do.
    """
    torch.set_num_threads(options.engine.threads)
    files = find_model(options.model, display.say)
    folder = WorkFolder(options.work)
    folder.path.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.path / _LOCK, timeout_seconds=_LOCK_SECONDS, progress=display.say):
        folder.claim(_identity(options, files))
        _answers(options, files, folder, display, stop)
        if options.until == "answers" or stop():
            return not stop()
        _ngrams(options, files, folder, display)
        if options.until == "ngrams":
            return True
        if not _head(options, files, folder, display, stop):
            return False
        if options.until == "head":
            return True
        return _draft(options, files, folder, display, stop)


def _identity(options: DistillOptions, files: ModelFiles) -> dict[str, Any]:
    """What all answers of a work folder have in common."""
    return {
        "model": files.model_id,
        "revision": files.revision,
        "tokenizer": tokenizer_fingerprint(files.folder),
        "top": options.generation.top,
        "seed": options.seed,
    }


def _answers(
    options: DistillOptions, files: ModelFiles, folder: WorkFolder, display: Display, stop: Callable[[], bool]
) -> None:
    wanted = options.generation.num_answer_tokens
    there = sum(said.num_tokens for said in folder.said())
    if there >= wanted:
        display.say(f"{there:,} answer tokens are in {folder.path} already")
        return
    fresh = _fresh_prompts(options)
    runner = start_runner(files, options.engine, progress=display.say).runner
    ends = end_token_ids_of(files.folder)

    def advance(tally: Tally, tokens_per_second: float) -> None:
        words = f"{tally.answer_tokens:,} of {wanted:,} answer tokens, {tokens_per_second:.0f} a second"
        display.progress("answers", completed=tally.answer_tokens, total=wanted, words=words)

    display.say(f"the target answers, into {folder.path}")
    tally = generate(
        folder,
        runner,
        ModelTokenizer(files.folder),
        fresh,
        options.generation,
        end_token_ids=ends,
        advance=advance,
        stop=stop,
    )
    if tally.too_long:
        display.say(f"{tally.too_long:,} prompts were left out: with their answers they may exceed {LONGEST:,} tokens")
    display.say(f"{tally.answers:,} answers of {tally.answer_tokens:,} tokens are in {folder.path}")


def _fresh_prompts(options: DistillOptions) -> Iterator[Asked]:
    """The user's own prompts, the built-in ones, or one of each in turn."""
    built_in = starters(options.seed)
    if options.prompts is None:
        return built_in
    own = own_prompts(options.prompts, seed=options.seed)
    return own if options.only_own_prompts else _alternating(own, built_in)


def _alternating(first: Iterator[Asked], second: Iterator[Asked]) -> Iterator[Asked]:
    """One of each in turn; the rest of the second when the first has ended."""
    for one in first:
        yield one
        other = next(second, None)
        if other is not None:
            yield other
    yield from second


def _ngrams(options: DistillOptions, files: ModelFiles, folder: WorkFolder, display: Display) -> None:
    """Some seconds, so it is made anew each time."""
    training, validation = split(read_examples(folder.shards))
    tokens = sum(len(example.top_ids) for example in training)
    origin = Origin(
        model_id=files.model_id,
        tokenizer_fingerprint=tokenizer_fingerprint(files.folder),
        vocab_size=max(vocabulary(files.folder)) + 1,
        num_answer_tokens=tokens,
    )
    table = learn(training, origin=origin)
    table.save(options.ngrams)
    right = sum(hits(table, example) for example in validation)
    held_out = sum(len(example.top_ids) for example in validation)
    display.say(
        f"{table.num_contexts:,} n-grams of {tokens:,} answer tokens are in {options.ngrams}; in held-out answers they "
        f"foretell {right / held_out:.1%} of the target's likeliest tokens: tandem up --draft-table {options.ngrams}"
    )


def _head(
    options: DistillOptions, files: ModelFiles, folder: WorkFolder, display: Display, stop: Callable[[], bool]
) -> bool:
    stage = HeadStage(
        files=files, folder=folder, path=options.head, settings=options.head_training, engine=options.engine
    )
    head = stage.run(display, stop)
    if head is None:
        return False
    display.say(
        f"the draft head is in {options.head}; in held-out answers {head.origin.greedy_acceptance:.1%} of its tokens "
        f"are accepted at temperature 0, and {head.origin.sampled_acceptance:.1%} at 1: tandem up --model "
        f"{options.model} --draft-head {options.head}"
    )
    return True


def _draft(
    options: DistillOptions, files: ModelFiles, folder: WorkFolder, display: Display, stop: Callable[[], bool]
) -> bool:
    torch.set_num_threads(options.engine.threads)  # an OpenVINO runner has left one
    shards = folder.shards
    training, validation = split(read_examples(shards))
    device = choose_device(options.engine.device)
    # A few layers of it are wanted, so it need not fit into a GPU beside them.
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    target = load_model(files, device="cpu", dtype=dtype, progress=display.say).model
    total: int = target.config.get_text_config(decoder=True).num_hidden_layers
    layers = options.training.layers or spread_layers(options.num_layers, total)
    if not all(0 <= layer < total for layer in layers):
        raise InvalidRequest(f"the target's layers are 0 to {total - 1}, not {layers}", param="from_layers")
    ids = likeliest_ids(training, count=options.training.vocabulary, always=end_token_ids_of(files.folder))
    settings = replace(options.training, layers=layers, vocabulary=len(ids))
    student = Student(
        new_student(target, layers, device=device), ids, bfloat16=choose_dtype("auto", device) is torch.bfloat16
    )
    del target
    run_folder = folder.path / run_name(settings, shards)
    covered = coverage(validation, ids)
    display.say(
        f"training {len(layers)} layers on {sum(len(e.top_ids) for e in training):,} answer tokens; the draft's "
        f"{len(ids):,} tokens are {covered:.1%} of the held-out answers"
    )

    def advance(report: TrainingReport) -> None:
        display.progress("training", completed=report.step, total=report.steps, words=report.words)

    done = train(
        student,
        training,
        validation,
        settings,
        run_folder,
        advance=advance,
        evaluated=lambda found: display.say(_acceptance_line(found)),
        resumed=lambda step: display.say(f"going on at step {step:,}, from {run_folder}"),
        stop=stop,
    )
    if not done:
        return False
    measured = acceptance(student, validation)
    making = Making(
        target=files,
        settings=settings,
        counts=(folder.manifest() or {})["counts"],
        prompts=_prompts_in_words(options),
        coverage=covered,
    )
    write_draft(student, making, measured, options.out, say=display.say)
    display.say(f"the draft is in {options.out}: tandem up --model {options.model} --draft-model {options.out}")
    return True


def _acceptance_line(found: Acceptance) -> str:
    greedy, sampled = found.greedy.get(ALL, 0.0), found.sampled.get(ALL, 0.0)
    kinds = ", ".join(f"{category} {rate:.2f}" for category, rate in found.greedy.items() if category != ALL)
    return f"acceptance {greedy:.3f} at temperature 0, {sampled:.3f} at 1 ({kinds})"


def _prompts_in_words(options: DistillOptions) -> str:
    if options.prompts is None:
        return "that come with Tandem"
    return "of its user's own" if options.only_own_prompts else "that come with Tandem and of its user's own"
