"""`tandem distill`, stage by stage. Each finds in the work folder how far it came, and goes on there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from tandem.distill.answers import GenerationSettings, Tally, generate
from tandem.distill.asked import Asked
from tandem.distill.chat import ModelTokenizer
from tandem.distill.own_prompts import own_prompts
from tandem.distill.starters.make import starters
from tandem.distill.work_folder import WorkFolder
from tandem.engine.factory import find_model, start_runner
from tandem.models.bundled import default_cache_dir, exclusive
from tandem.models.facts import end_token_ids, read_config
from tandem.models.locate import ModelFiles
from tandem.models.tokenizer_files import tokenizer_fingerprint, vocabulary
from tandem.settings import EngineSettings

_LOCK: Final = ".lock"
_LOCK_SECONDS: Final = 5.0


class Display(Protocol):
    """Where the stages say how far they are."""

    def say(self, line: str) -> None: ...

    def progress(self, stage: str, *, completed: float, total: float, words: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """What the command line asks for."""

    model: str
    work: Path
    prompts: Path | None
    only_own_prompts: bool
    seed: int
    until: Literal["answers", "draft"]
    generation: GenerationSettings
    engine: EngineSettings


def default_work_folder(model: str) -> Path:
    """Where the work on a target's draft is kept unless the user says otherwise."""
    return default_cache_dir() / "distill" / "".join(c if c.isalnum() or c in "-._" else "-" for c in model)


def run_distill(options: DistillOptions, display: Display, stop: Callable[[], bool]) -> bool:
    """All stages that are not done yet; whether all are done now, which they are not after `stop`.

    Raises TandemError, saying what to do.
    """
    files = find_model(options.model, display.say)
    folder = WorkFolder(options.work)
    folder.path.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.path / _LOCK, timeout_seconds=_LOCK_SECONDS, progress=display.say):
        folder.claim(
            {
                "model": files.model_id,
                "revision": files.revision,
                "tokenizer": tokenizer_fingerprint(files.folder),
                "top": options.generation.top,
                "seed": options.seed,
            }
        )
        _generate(options, files, folder, display, stop)
        return not stop()


def _generate(
    options: DistillOptions, files: ModelFiles, folder: WorkFolder, display: Display, stop: Callable[[], bool]
) -> None:
    wanted = options.generation.num_answer_tokens
    there = sum(said.num_tokens for said in folder.said())
    if there >= wanted:
        display.say(f"{there:,} answer tokens are in {folder.path} already")
        return
    fresh = _fresh_prompts(options)
    runner = start_runner(files, options.engine, progress=display.say).runner
    ends = end_token_ids(files.folder, read_config(files.folder), vocabulary(files.folder))

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
        end_token_ids=frozenset(ends),
        advance=advance,
        stop=stop,
    )
    display.say(f"{tally.answers:,} answers of {tally.answer_tokens:,} tokens are in {folder.path}")


def _fresh_prompts(options: DistillOptions) -> Iterator[Asked]:
    """The user's own prompts, the built-in ones, or one of each in turn."""
    built_in = starters(options.seed)
    if options.prompts is None:
        return built_in
    own = own_prompts(options.prompts, seed=options.seed)
    return own if options.only_own_prompts else _alternating(own, built_in)


def _alternating(first: Iterator[Asked], second: Iterator[Asked]) -> Iterator[Asked]:
    """One of each in turn; the rest of one when the other has ended."""
    for one in first:
        yield one
        other = next(second, None)
        if other is not None:
            yield other
    yield from second
