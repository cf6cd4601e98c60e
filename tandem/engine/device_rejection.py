"""The rejection rule of rejection.py for logits on a GPU: one small copy there, one small copy back.

All positions are worked out at once; what lies behind a rejection is wasted, and costs a GPU next to nothing. Reading a
number, in contrast, costs a wait for all that was asked of the GPU before. Host and device compare and subtract the
same float32 and float64 numbers, so that with equal laws they decide alike.

Shapes: k drafted tokens, m entries of the largest draft law.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.draft_law import SparseLaw

_COLUMNS = 3  # before the draft's law


def accept(
    target_probs: torch.Tensor,
    drafted: Sequence[int],
    laws: Sequence[SparseLaw] | None,
    *,
    accept_uniforms: Sequence[float],
    target_uniforms: Sequence[float],
) -> tuple[int, int]:
    """How many drafted tokens stand, and the token behind them; `target_probs` [k + 1, vocab] may be on any device.

    `accept_uniforms` has the k numbers that acceptance is decided with, `target_uniforms` the k + 1 that the target's
    own token is drawn with at each position. Raises ValueError where no token has a probability.
    """
    table = torch.from_numpy(_table(drafted, laws, accept_uniforms, target_uniforms))
    numbers = table.to(target_probs.device, non_blocking=True)  # else it would wait, as a read does
    token_ids, thresholds = numbers[:, 0].to(torch.int64), numbers[:, 1]
    probs_of_drafted = target_probs.gather(1, token_ids[:, None])[:, 0].to(torch.float64)
    stands = (thresholds < probs_of_drafted).to(torch.int64)
    num_accepted = stands.cumprod(dim=0).sum(dim=0, keepdim=True)  # [1]
    row = numbers.index_select(0, num_accepted)[0]
    probs = target_probs.index_select(0, num_accepted)[0]
    law_ids, law_probs = row[_COLUMNS:].view(2, -1)
    residual = probs.index_add(0, law_ids.to(torch.int64), -law_probs.to(probs.dtype)).clamp_(min=0.0)
    # Equal laws leave nothing; a rejection is then a matter of rounding, and the target's own is the law.
    weights = torch.where(residual.sum() > 0.0, residual, probs)
    cumulative = weights.to(torch.float64).cumsum(dim=0)
    total = cumulative[-1:]
    token_id = torch.searchsorted(cumulative, row[2] * total, right=True)
    # u * total may be rounded up to the total; then it is the last token with a weight, the first to reach the total.
    token_id = torch.minimum(token_id, torch.searchsorted(cumulative, total))
    accepted, chosen, possible = torch.cat([num_accepted, token_id, (total > 0.0).to(torch.int64)]).tolist()
    if not possible:
        raise ValueError("there is no token to draw: all are banned, or the logits are not finite")
    return accepted, chosen


def _table(
    drafted: Sequence[int],
    laws: Sequence[SparseLaw] | None,
    accept_uniforms: Sequence[float],
    target_uniforms: Sequence[float],
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """All that the device is told, [k + 1, 3 + 2 m] in float64, which holds ids and float32 numbers as they are.

    A row: drafted id; u * q, which p must exceed; u of the target's token; ids and probabilities of the draft's law,
    padded with nothing of token 0. In the last row, the bonus token's, nothing is drafted, and nothing can stand.
    """
    k = len(drafted)
    if laws is None:  # a deterministic drafter: one-hot
        laws = [SparseLaw(np.array([i], dtype=np.uint32), np.ones(1, dtype=np.float32)) for i in drafted]
    m = max((len(law.token_ids) for law in laws), default=1)
    table = np.zeros((k + 1, _COLUMNS + 2 * m))
    table[:, 2] = target_uniforms
    table[k, 1] = np.inf
    for row, token_id, law, u in zip(table, drafted, laws, accept_uniforms, strict=False):
        size = len(law.token_ids)
        row[0] = token_id
        row[1] = u * float(law.probs[law.token_ids == token_id][0])
        row[_COLUMNS : _COLUMNS + size] = law.token_ids
        row[_COLUMNS + m : _COLUMNS + m + size] = law.probs
    return table
