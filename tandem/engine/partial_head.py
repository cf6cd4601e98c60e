"""Logits of some tokens as logits of all, for a draft whose head is for some only (models/draft_vocabulary.py)."""

from __future__ import annotations

import torch


def spread(logits: torch.Tensor, token_ids: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """[R, vocab_size], float32, from logits [R, V] of the tokens `token_ids` [V]; the others' are -inf."""
    everything = torch.full((len(logits), vocab_size), -torch.inf, device=logits.device)
    return everything.index_copy_(1, token_ids, logits.float())
