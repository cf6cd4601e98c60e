"""The finished draft as files: a Hugging Face folder, a GGUF file, the draft's vocabulary, and a model card."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tandem import __version__
from tandem.distill.evaluation import ALL, Acceptance
from tandem.distill.student import Student
from tandem.distill.training import TrainingSettings
from tandem.errors import InvalidRequest, Unavailable
from tandem.models.draft_vocabulary import FILE, vocabulary_file
from tandem.models.gguf_export import export_gguf
from tandem.models.locate import ModelFiles
from tandem.models.tokenizer_files import tokenizer_files

GGUF: Final = "draft.gguf"
CARD: Final = "README.md"
_QUANTIZATION: Final = "Q8_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """How a draft was made, for its card."""

    target: ModelFiles
    settings: TrainingSettings
    counts: Mapping[str, Any]  # of the answers: see work_folder.py
    prompts: str  # where they are from
    coverage: float  # share of the held-out answers' tokens that the draft can say


def write_draft(
    student: Student, making: Making, measured: Acceptance, folder: Path, *, say: Callable[[str], None]
) -> None:
    """Write `folder` whole, in place of what is there; the student's weights are bfloat16 then.

    Raises Unavailable where it cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder.parent) as temporary:
            whole = Path(temporary) / folder.name
            student.model.to(torch.bfloat16).save_pretrained(whole)
            for weights in whole.glob("*.safetensors"):
                weights.chmod(0o644)  # safetensors lets only the owner read; the draft service may be another user
            for name, content in tokenizer_files(making.target.folder).items():
                (whole / name).write_bytes(content)
            (whole / FILE).write_bytes(vocabulary_file(student.vocabulary))
            try:
                export_gguf(whole, whole / GGUF, quantization=_QUANTIZATION)
            except InvalidRequest as error:
                (whole / GGUF).unlink(missing_ok=True)
                say(f"no GGUF file of the draft: {error.message}")
            (whole / CARD).write_text(card(making, measured), encoding="utf-8")
            if folder.exists():
                folder.rename(Path(temporary) / "previous")
            whole.rename(folder)
    except OSError as error:
        raise Unavailable(f"cannot write the draft to {folder}: {error}; make room, or give another --out") from error


def card(making: Making, measured: Acceptance) -> str:
    """The model card, in Markdown."""
    settings, counts = making.settings, making.counts
    layers = ", ".join(map(str, settings.layers))
    by_category: Mapping[str, int] = counts["answer_tokens_by_category"]
    rows = "\n".join(
        f"| {category} | {_share(measured.greedy.get(category))} | {_share(measured.sampled.get(category))} |"
        for category in (ALL, *sorted((measured.greedy.keys() | measured.sampled.keys()) - {ALL}))
    )
    depths = ", ".join(f"{rate:.2f}" for rate in measured.by_depth)
    return f"""# A draft for {making.target.model_id}

A small model that guesses the next tokens of {making.target.model_id}, for speculative decoding. It is of use beside
that model only: by itself it writes nonsense. Made by `tandem distill` {__version__}.

* Target: {making.target.model_id}, revision {making.target.revision or "unknown (a plain folder)"}.
* {len(settings.layers)} layers, which began as copies of the target's layers {layers}; embeddings, tokenizer and head
  are the target's own, so its licence is the target's too.
* The head is for the {settings.vocabulary:,} token ids in `{FILE}`; they make up {making.coverage:.1%} of the held-out
  answers. Other tokens it never proposes, which costs acceptance there, and changes nothing in the text.
* Trained on the target's own answers: {counts["answers"]:,} answers of {counts["answer_tokens"]:,} tokens to prompts
  {making.prompts}, with the target's law at each token.
* {settings.epochs:g} epochs, {settings.batch_tokens:,} tokens a batch, AdamW, learning rate {settings.learning_rate:g}.

| answer tokens by kind of prompt | |
|---|---|
{chr(10).join(f"| {category} | {number:,} |" for category, number in by_category.items())}

## Acceptance

On answers that it has not seen, of prompts that were held out with their subjects:
{measured.num_greedy_tokens:,} tokens at temperature 0, {measured.num_sampled_tokens:,} at temperature 1.

| kind of prompt | temperature 0 | temperature 1 |
|---|---|---|
{rows}

After 0, 1, 2, ... accepted tokens in the same round, at temperature 0: {depths}.
"""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
