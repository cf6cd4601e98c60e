"""What every training has in common: the optimizer and its learning rate, a step of it, what is said meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

_WARM_UP_SHARE: Final = 0.04
_LAST_RATE: Final = 0.05  # of the highest
_BETAS: Final = (0.9, 0.98)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """Of one moment of the training."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    greedy: float | None  # of the last evaluation

    @property
    def words(self) -> str:
        greedy = "" if self.greedy is None else f", acceptance {self.greedy:.3f}"
        return (
            f"step {self.step:,} of {self.steps:,}, loss {self.loss:.3f}, "
            f"{self.tokens_per_second:,.0f} tokens a second{greedy}"
        )


class Meter:
    """Running means of the loss and of the speed."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tokens = 0
        self.loss = math.nan

    def add(self, loss: float, tokens: int) -> None:
        self._tokens += tokens
        self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / max(1e-9, time.monotonic() - self._began)


def adamw(
    parameters: Sequence[torch.nn.Parameter], *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer of matrices and vectors. Norms and the like are not pulled to zero."""
    decayed = [value for value in parameters if value.ndim > 1]
    others = [value for value in parameters if value.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=_BETAS,
        fused=True,
    )


def descend(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    *,
    learning_rate: float,
) -> float:
    """One step against the gradient of `loss`, which is returned as a number."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return float(loss.detach())


def rate_share(step: int, steps: int) -> float:
    """The share of the highest rate at `step` of `steps`: a linear warm-up, then a cosine down to a twentieth."""
    warm_up = max(1, round(_WARM_UP_SHARE * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return _LAST_RATE + (1.0 - _LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * done))
