"""Log-probabilities of tokens, as the raw model has them: before penalties, bias, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.types import TokenLogprob


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], *, num_top: int) -> tuple[TokenLogprob, ...]:
    """Of n tokens, from the logits [n or more, vocab] whose row i is the law that token i was drawn from."""
    rows = logits[: len(token_ids)]
    # Of the values that are wanted only: the whole log_softmax would write n * vocab numbers.
    totals = rows.logsumexp(dim=-1)
    own = rows[torch.arange(len(token_ids)), list(token_ids)] - totals
    top = rows.topk(num_top, dim=-1)
    tops = zip(top.indices.tolist(), (top.values - totals[:, None]).tolist(), strict=True)
    return tuple(
        TokenLogprob(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, (ids, values) in zip(own.tolist(), tops, strict=True)
    )
