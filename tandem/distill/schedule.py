"""The learning rate over a training."""

from __future__ import annotations

import math
from typing import Final

_WARM_UP_SHARE: Final = 0.04
_LAST_RATE: Final = 0.05  # of the highest


def rate_share(step: int, steps: int) -> float:
    """The share of the highest rate at `step` of `steps`: a linear warm-up, then a cosine down to a twentieth."""
    warm_up = max(1, round(_WARM_UP_SHARE * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return _LAST_RATE + (1.0 - _LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * done))
