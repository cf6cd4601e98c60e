"""How far the student's law is from the target's, and the gradient of that, in one go over the head's rows."""

from __future__ import annotations

from typing import Any, Final

import torch

_ROWS_AT_ONCE: Final = 512  # keeps the logits in the CPU's cache, more or less


class _LawLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        target_ids: torch.Tensor,
        target_probs: torch.Tensor,
        overlap: float,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            ids, probs = target_ids[rows], target_probs[rows]
            logits = (hidden[rows].to(head.dtype) @ head.T).float()
            log_sums = logits.logsumexp(dim=-1, keepdim=True)
            known = probs.sum(dim=-1, keepdim=True)
            log_q = logits.gather(1, ids) - log_sums
            law = logits.sub_(log_sums).exp_()
            total += (torch.xlogy(probs, probs) - probs * log_q).sum() * (1.0 - overlap)
            at_ids = -probs * (1.0 - overlap)
            weight = known * (1.0 - overlap)
            if overlap:
                q = log_q.exp()
                below = (q < probs).float() * (probs > 0)
                total += (known.sum() - torch.minimum(q, probs).sum()) * overlap
                weight = weight + overlap * (q * below).sum(dim=-1, keepdim=True)
                at_ids = at_ids - overlap * q * below
            law *= weight
            law.scatter_add_(1, ids, at_ids)
            gradient[rows] = (law.to(head.dtype) @ head).float()
        ctx.save_for_backward(gradient.div_(len(hidden)))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None, None, None


def law_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    target_ids: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    overlap: float = 0.0,
) -> torch.Tensor:
    """The mean over rows of (1 - overlap) KL + overlap TV between the target's law and softmax(hidden @ head.T).

    `hidden` [A, H]; `head` [V, H], frozen; `target_probs` [A, K] of the tokens at `target_ids` [A, K], places in the
    head. What the target gives to other tokens is left out of both:

        KL = sum_k p_k log(p_k / q_k)        TV = sum_k p_k - min(p_k, q_k)

    The sum of min(p, q) is the chance that a drafted token is accepted at temperature 1 (Leviathan et al. 2022, theorem
    3.5), so TV is what is lost of it.
    """
    loss: torch.Tensor = _LawLoss.apply(hidden, head, target_ids, target_probs, overlap)  # type: ignore[no-untyped-call]
    return loss
