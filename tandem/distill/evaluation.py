"""How often a draft's tokens are accepted, on answers that it has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tandem.distill.dataset import Example
from tandem.distill.student import Student

DEPTHS: Final = 5
_BATCH_TOKENS: Final = 4096
_ROWS_AT_ONCE: Final = 512
ALL: Final = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Shares of drafted tokens that are accepted, by category; `all` is one of them.

    `greedy`: at temperature 0, in answers drawn at 0. `sampled`: at temperature 1, in answers drawn at 1: the mean sum
    of min(target's law, draft's law), less what the target gives beyond its likeliest tokens, so a little too low.
    `by_depth[d]`: at temperature 0, of tokens drafted after d accepted ones in the same round.
    """

    greedy: dict[str, float]
    sampled: dict[str, float]
    by_depth: tuple[float, ...]
    num_greedy_tokens: int
    num_sampled_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "greedy": self.greedy,
            "sampled": self.sampled,
            "by_depth": list(self.by_depth),
            "greedy_tokens": self.num_greedy_tokens,
            "sampled_tokens": self.num_sampled_tokens,
        }


def acceptance(student: Student, examples: Sequence[Example]) -> Acceptance:
    """The student's acceptance on these answers."""
    matches: dict[str, list[npt.NDArray[np.bool_]]] = {}
    overlaps: dict[str, list[npt.NDArray[np.float32]]] = {}
    for example, match, overlap in _each(student, examples):
        for category in (ALL, example.asked.category):
            if example.asked.temperature == 0.0:
                matches.setdefault(category, []).append(match)
            elif example.asked.temperature == 1.0:
                overlaps.setdefault(category, []).append(overlap)
    greedy = {category: float(np.concatenate(found).mean()) for category, found in sorted(matches.items())}
    sampled = {category: float(np.concatenate(found).mean()) for category, found in sorted(overlaps.items())}
    return Acceptance(
        greedy=greedy,
        sampled=sampled,
        by_depth=_by_depth(matches.get(ALL, [])),
        num_greedy_tokens=sum(map(len, matches.get(ALL, []))),
        num_sampled_tokens=sum(map(len, overlaps.get(ALL, []))),
    )


def _by_depth(matches: Sequence[npt.NDArray[np.bool_]]) -> tuple[float, ...]:
    """A draft whose tokens were all right so far reads the target's own text: runs of matches are rounds."""
    rates: list[float] = []
    for depth in range(DEPTHS):
        right = tried = 0
        for match in matches:
            ends = len(match) - depth
            if ends > 0:
                before = np.logical_and.reduce([match[i : i + ends] for i in range(depth)]) if depth else True
                tried += int(np.sum(before)) if depth else ends
                right += int(np.sum(match[depth:] & before))
        rates.append(right / tried if tried else 0.0)
    return tuple(rates)


def _each(
    student: Student, examples: Sequence[Example]
) -> Iterator[tuple[Example, npt.NDArray[np.bool_], npt.NDArray[np.float32]]]:
    """For each example: whether its tokens are the student's likeliest [A], and the overlap of the two laws [A]."""
    head = student.head.float()
    ordered = sorted(examples, key=len)
    with torch.no_grad():
        while ordered:
            size = max(1, _BATCH_TOKENS // len(ordered[-1]))
            group, ordered = ordered[-size:], ordered[:-size]
            batch = student.batch(group)
            hidden = student.hidden(batch)
            match = np.empty(len(hidden), dtype=np.bool_)
            overlap = np.empty(len(hidden), dtype=np.float32)
            answers = np.concatenate([example.token_ids[example.prompt_length :] for example in group])
            for start in range(0, len(hidden), _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                logits = hidden[rows] @ head.T
                said = student.vocabulary[logits.argmax(dim=-1).cpu().numpy()]
                match[rows] = said == answers[rows]
                law = (logits.gather(1, batch.target_ids[rows]) - logits.logsumexp(dim=-1, keepdim=True)).exp()
                overlap[rows] = torch.minimum(law, batch.target_probs[rows]).sum(dim=-1).cpu().numpy()
            row = 0
            for example in group:
                rows = slice(row, row + len(example) - example.prompt_length)
                row = rows.stop
                yield example, match[rows], overlap[rows]
