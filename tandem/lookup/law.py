"""From what a table says to the law that a sampled request's draft is drawn from, and the draw. Pure; no torch.

Any law is exact, as long as it is the one that is sent (tandem/engine/rejection.py). So what a table of a few tokens
cannot know is left to the target: penalties, which need the model's logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.draft_law import SparseLaw, draw_sparse
from tandem.randomness import Purpose, renewed_uniform, uniforms_of
from tandem.types import SamplingParams, SessionStart, Verification

FloatArray = npt.NDArray[np.float64]

_HEAD_WEIGHT = 0.8  # of the draft head beside the table; 0.7 and 0.9 are within 0.3 % of it


def mixed(table: Sequence[tuple[int, float]], head: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """What a table and a draft head say together, likeliest first; either may be empty, and is then left out."""
    if not head or not table:
        return head or table
    probs: dict[int, float] = {token_id: _HEAD_WEIGHT * prob for token_id, prob in head}
    for token_id, prob in table:
        probs[token_id] = probs.get(token_id, 0.0) + (1.0 - _HEAD_WEIGHT) * prob
    return sorted(probs.items(), key=lambda one: (-one[1], one[0]))


def shaped(said: Sequence[tuple[int, float]], params: SamplingParams, *, num_generated: int) -> SparseLaw | None:
    """The law of the next token by `said`, tokens and their probabilities at temperature 1, likeliest first.

    After logit_bias, banned tokens, min_tokens, temperature, top_k, top_p and min_p, as in tandem/engine/sampling.py.
    None where nothing may follow.
    """
    banned = set(params.banned_token_ids)
    if num_generated < params.min_tokens:
        banned.update(params.end_token_ids)
    bias = dict(params.logit_bias)
    logits = {token: math.log(p) + bias.get(token, 0.0) for token, p in said if p > 0.0 and token not in banned}
    if not logits:
        return None
    ids = np.array(list(logits), dtype=np.uint32)
    values = np.array(list(logits.values()))
    probs = np.exp((values - values.max()) / params.temperature)
    order = np.argsort(-probs, kind="stable")
    ids, probs = ids[order], probs[order] / probs.sum()
    kept = _num_kept(probs, params)
    weights = probs[:kept].astype(np.float32)
    return SparseLaw(ids[:kept], weights / weights.sum(dtype=np.float32))


def draw(law: SparseLaw, start: SessionStart, *, position: int, text_length: int) -> int:
    """The token for absolute `position`, in a draft behind a text of `text_length` tokens.

    Under the coupled rule the one that the noise of the position picks, which the target will use too.
    """
    if start.verification is Verification.COUPLED:
        exponentials = -np.log1p(-uniforms_of(start.seed, position, law.token_ids).astype(np.float64))
        return int(law.token_ids[int(np.argmax(law.probs / exponentials))])
    return draw_sparse(law, renewed_uniform(start.seed, position, Purpose.DRAFT, text_length=text_length))


def _num_kept(probs: FloatArray, params: SamplingParams) -> int:
    """How many of these, largest first, top_k, top_p and min_p leave."""
    kept = len(probs)
    if params.top_k > 0:
        kept = min(kept, params.top_k)
    if params.top_p < 1.0:
        total = probs[:kept].sum()
        mass_ahead = (np.cumsum(probs[:kept]) - probs[:kept]) / total
        kept = max(1, int(np.count_nonzero(mass_ahead < params.top_p)))
    return max(1, int(np.count_nonzero(probs[:kept] >= params.min_p * probs[0])))
