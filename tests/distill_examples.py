"""Answers with laws that are made up, for what learns from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.distill.asked import Asked
from tandem.distill.dataset import Example

VOCAB = 260
TOP = 8


def asked(index: int, *, temperature: float = 0.0, validation: bool = False, category: str = "tests") -> Asked:
    return Asked(
        key=f"{index}",
        category=category,
        messages=({"role": "user", "content": "?"},),
        validation=validation,
        temperature=temperature,
        max_tokens=64,
    )


def example(
    token_ids: Sequence[int], prompt_length: int, laws: npt.NDArray[np.float32] | None = None, **of_asked: object
) -> Example:
    """Answer tokens have the law given [A, VOCAB], or else a random one whose top is the token itself."""
    rng = np.random.default_rng(len(token_ids))
    answer = np.array(token_ids[prompt_length:])
    if laws is None:
        logits = rng.normal(size=(len(answer), VOCAB)).astype(np.float32)
        logits[np.arange(len(answer)), answer] = logits.max() + 1.0
        laws = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    top = np.argsort(-laws, axis=-1, kind="stable")[:, :TOP]
    return Example(
        asked=asked(len(token_ids), **of_asked),  # type: ignore[arg-type]
        token_ids=np.array(token_ids, dtype=np.int32),
        prompt_length=prompt_length,
        top_ids=top.astype(np.int32),
        top_log_probs=np.log(np.take_along_axis(laws, top, axis=-1)).astype(np.float16),
    )


def random_examples(count: int, *, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [example(rng.integers(0, 250, int(n)).tolist(), int(n) // 2) for n in rng.integers(4, 60, count)]
