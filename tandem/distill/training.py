"""Training the student: batches, schedule, checkpoints, early stopping."""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tandem.distill.dataset import Example, batches
from tandem.distill.evaluation import ALL, Acceptance, acceptance
from tandem.distill.loss import law_loss
from tandem.distill.optimizing import Meter, TrainingReport, adamw, descend, rate_share
from tandem.distill.student import Student
from tandem.distill.work_folder import write_whole
from tandem.errors import InvalidRequest

CHECKPOINT: Final = "checkpoint.pt"
BEST: Final = "best.pt"
_CHECKPOINT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How the student is trained. All of it decides which run a checkpoint belongs to.

    `overlap` is the share of the loss that is the acceptance itself rather than the divergence; see loss.py.
    `patience` evaluations without a better acceptance end the training.
    """

    layers: tuple[int, ...]
    vocabulary: int
    epochs: float
    batch_tokens: int
    learning_rate: float
    weight_decay: float
    overlap: float
    evaluations: int
    patience: int
    seed: int


def run_name(settings: TrainingSettings, shards: Sequence[Path]) -> str:
    """A folder name for training with these settings on these shards."""
    content = json.dumps([asdict(settings), [shard.name for shard in shards]], sort_keys=True)
    return f"training-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def train(
    student: Student,
    training: Sequence[Example],
    validation: Sequence[Example],
    settings: TrainingSettings,
    folder: Path,
    *,
    advance: Callable[[TrainingReport], None],
    evaluated: Callable[[Acceptance], None],
    resumed: Callable[[int], None],
    stop: Callable[[], bool],
) -> bool:
    """Train from where `folder` has it, and leave the weights with the best acceptance in the student.

    Whether it came to its end: not where `stop` said so, after which the folder has all that is needed to go on.
    `resumed` is told the step at which an earlier run is taken up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = _Run(student, training, validation, settings, folder)
    if run.step:
        resumed(run.step)
    return run.go(advance, evaluated, stop)


class _Run:
    def __init__(
        self,
        student: Student,
        training: Sequence[Example],
        validation: Sequence[Example],
        settings: TrainingSettings,
        folder: Path,
    ) -> None:
        self._student = student
        self._training = training
        self._validation = validation
        self._settings = settings
        self._folder = folder
        self._parameters = student.parameters()
        self._optimizer = adamw(
            list(self._parameters.values()),
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
        self.step = 0
        self._evaluations: list[float] = []  # greedy and sampled acceptance, summed
        self._greedy: float | None = None
        per_epoch = sum(1 for _ in self._epoch(0))
        self._steps = max(1, round(settings.epochs * per_epoch))
        self._load()

    def go(
        self,
        advance: Callable[[TrainingReport], None],
        evaluated: Callable[[Acceptance], None],
        stop: Callable[[], bool],
    ) -> bool:
        saved = time.monotonic()
        every = max(1, math.ceil(self._steps / self._settings.evaluations))
        meter = Meter()
        for group in self._remaining():
            if self._over():
                break
            if stop():
                self._save()
                return False
            loss = self._learn(group)
            self.step += 1
            meter.add(loss, sum(map(len, group)))
            advance(
                TrainingReport(
                    step=self.step,
                    steps=self._steps,
                    loss=meter.loss,
                    tokens_per_second=meter.tokens_per_second,
                    greedy=self._greedy,
                )
            )
            if self.step % every == 0 or self.step == self._steps:
                evaluated(self._evaluate())
                self._save()
                saved = time.monotonic()
            elif time.monotonic() - saved > _CHECKPOINT_SECONDS:
                self._save()
                saved = time.monotonic()
        self._take(torch.load(self._folder / BEST, map_location="cpu", weights_only=True))
        return True

    def _epoch(self, number: int) -> Iterator[list[Example]]:
        rng = np.random.default_rng((self._settings.seed, number))
        return batches(self._training, most_tokens=self._settings.batch_tokens, rng=rng)

    def _remaining(self) -> Iterator[list[Example]]:
        """The batches from the current step to the last, as an uninterrupted run has them."""
        step, number = 0, 0
        while step < self._steps:
            for group in self._epoch(number):
                if step >= self._steps:
                    return
                if step >= self.step:
                    yield group
                step += 1
            number += 1

    def _learn(self, group: list[Example]) -> float:
        batch = self._student.batch(group)
        loss = law_loss(
            self._student.hidden(batch),
            self._student.head_for_training,
            batch.target_ids,
            batch.target_probs,
            overlap=self._settings.overlap,
        )
        rate = self._settings.learning_rate * rate_share(self.step, self._steps)
        return descend(loss, self._optimizer, list(self._parameters.values()), learning_rate=rate)

    def _evaluate(self) -> Acceptance:
        found = acceptance(self._student, self._validation)
        score = found.greedy.get(ALL, 0.0) + found.sampled.get(ALL, 0.0)
        if not self._evaluations or score > max(self._evaluations):
            _save(self._folder / BEST, {name: value.detach().cpu() for name, value in self._parameters.items()})
        self._evaluations.append(score)
        self._greedy = found.greedy.get(ALL)
        return found

    def _over(self) -> bool:
        """Whether the last evaluations brought nothing."""
        scores, patience = self._evaluations, self._settings.patience
        return len(scores) > patience and max(scores[-patience:]) <= max(scores[:-patience])

    def _take(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in self._parameters.items():
                value.copy_(weights[name])

    def _save(self) -> None:
        _save(
            self._folder / CHECKPOINT,
            {
                "step": self.step,
                "evaluations": self._evaluations,
                "greedy": self._greedy,
                "weights": {name: value.detach().cpu() for name, value in self._parameters.items()},
                "optimizer": self._optimizer.state_dict(),
            },
        )

    def _load(self) -> None:
        path = self._folder / CHECKPOINT
        if not path.is_file():
            return
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self._take(state["weights"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self._evaluations, self._greedy = state["step"], state["evaluations"], state["greedy"]
        except Exception as error:  # torch.load raises nearly everything for a file it does not like
            raise InvalidRequest(f"{path} is damaged ({error}); delete {self._folder} to train anew") from error


def _save(path: Path, content: object) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_whole(path, buffer.getvalue())
