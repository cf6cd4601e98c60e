"""The answers as training data: all of them in memory, batches of like length, and the draft's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from tandem.distill.asked import Asked
from tandem.errors import InvalidRequest

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One answer after its prompt. Row i of the laws is that of answer token i."""

    asked: Asked
    token_ids: Int32Array  # [T], prompt and answer
    prompt_length: int
    top_ids: Int32Array  # [A, top]
    top_log_probs: npt.NDArray[np.float16]  # [A, top]

    def __len__(self) -> int:
        return len(self.token_ids)


def read_examples(shards: Sequence[Path]) -> list[Example]:
    """All answers of these shards, in their order."""
    examples: list[Example] = []
    for shard in shards:
        with safe_open(shard, framework="numpy") as opened:
            answers = json.loads(opened.metadata()["answers"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
        starts, prompt_lengths = tensors["sequence_starts"], tensors["prompt_lengths"]
        law = 0
        for index, answer in enumerate(answers):
            token_ids = tensors["token_ids"][starts[index] : starts[index + 1]]
            laws = slice(law, law + len(token_ids) - int(prompt_lengths[index]))
            law = laws.stop
            examples.append(
                Example(
                    asked=Asked.from_json(answer["asked"]),
                    token_ids=token_ids,
                    prompt_length=int(prompt_lengths[index]),
                    top_ids=tensors["top_ids"][laws],
                    top_log_probs=tensors["top_log_probs"][laws],
                )
            )
    return examples


def split(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Those to train on, and those held out. Raises InvalidRequest where a side is empty."""
    training = [example for example in examples if not example.asked.validation]
    validation = [example for example in examples if example.asked.validation]
    if not training or not validation:
        raise InvalidRequest(
            f"{len(training)} answers to train on and {len(validation)} held out are too few: generate more (--tokens)",
            param="tokens",
        )
    return training, validation


def likeliest_ids(examples: Sequence[Example], *, count: int, always: frozenset[int]) -> npt.NDArray[np.int64]:
    """The `count` token ids that have most of the target's mass over all answers, ascending; `always` among them.

    After FR-Spec (Zhao et al. 2025), which counts tokens of a corpus; the target's own laws say more about ids that it
    hardly ever says.
    """
    most = max(int(example.top_ids.max()) for example in examples) + 1
    mass = np.zeros(max(most, max(always, default=0) + 1))
    for example in examples:
        np.add.at(mass, example.top_ids.ravel(), np.exp(example.top_log_probs.astype(np.float32)).ravel())
    mass[sorted(always)] = np.inf
    ordered = np.lexsort((np.arange(len(mass)), -mass))
    return np.sort(ordered[: min(count, int(np.count_nonzero(mass)))]).astype(np.int64)


def coverage(examples: Sequence[Example], ids: npt.NDArray[np.int64]) -> float:
    """The share of the answers' tokens that are among `ids`."""
    said = np.concatenate([example.token_ids[example.prompt_length :] for example in examples])
    return float(np.isin(said, ids).mean())


def batches(examples: Sequence[Example], *, most_tokens: int, rng: np.random.Generator) -> Iterator[list[Example]]:
    """Every example once, in batches of like length that hold `most_tokens` with padding, in random order."""
    # Neighbours in length share a batch; a little noise makes them other neighbours each time.
    lengths = np.array([len(example) for example in examples])
    order = np.argsort(lengths * rng.uniform(0.95, 1.05, size=len(lengths)))
    groups: list[list[Example]] = []
    group: list[Example] = []
    longest = 0
    for index in order:
        longest = max(longest, int(lengths[index]))
        if group and longest * (len(group) + 1) > most_tokens:
            groups.append(group)
            group, longest = [], int(lengths[index])
        group.append(examples[index])
    groups.append(group)
    for index in rng.permutation(len(groups)):
        yield groups[index]
