"""A user's own prompts, from a workload file as `tandem bench` takes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tandem.bench.workload import load_workload
from tandem.distill.asked import Asked
from tandem.distill.starters.make import ANSWER_TOKENS, temperature

_VALIDATION_EVERY: Final = 20
_MOST_ROUNDS: Final = 4  # how often each prompt is asked, at other temperatures


def own_prompts(path: Path, *, seed: int) -> Iterator[Asked]:
    """The prompts of a file in a seeded order; then once more, up to four times, drawn anew. Later turns follow.

    One prompt in twenty is held out, in every round. Raises InvalidRequest, with the line and the field.
    """
    prompts = load_workload(path).prompts
    order = np.random.default_rng(seed).permutation(len(prompts))
    for round_ in range(_MOST_ROUNDS):
        for place, index in enumerate(order):
            prompt = prompts[index]
            rng = np.random.default_rng((seed, round_, int(index)))
            yield Asked(
                key=f"{seed}-own-{round_}-{prompt.name}",
                category=prompt.category,
                messages=(*prompt.opening, {"role": "user", "content": prompt.turns[0]}),
                validation=place % _VALIDATION_EVERY == 0,
                # The first round as most people decode a small model's drafts, so that a short run has that at least.
                temperature=0.0 if round_ == 0 else temperature(rng),
                max_tokens=prompt.max_tokens or ANSWER_TOKENS,
                later_turns=prompt.turns[1:],
            )
