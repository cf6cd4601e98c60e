"""Draft heads of random numbers, for whoever needs a sound file."""

from __future__ import annotations

import numpy as np

from tandem.draft_head import DraftHeadWeights, HeadOrigin, RoundedMatrix

FINGERPRINT = "f" * 64


def random_head(
    *,
    width: int = 12,
    token_ids: tuple[int, ...] = (1, 3, 4, 8, 20),
    fingerprint: str = FINGERPRINT,
    sharpness: float = 1.0,
) -> DraftHeadWeights:
    """Of a state of `width` numbers; rows of tokens have 6, and the gated layer 16. `sharpness`: of its laws."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, size: float = 1.0) -> RoundedMatrix:
        return RoundedMatrix.of(rng.normal(0.0, size * columns**-0.5, size=(rows, columns)).astype(np.float32))

    return DraftHeadWeights(
        token_ids=np.array(token_ids, dtype=np.uint32),
        tokens=matrix(len(token_ids) + 1, 6),
        from_state=matrix(width, width),
        from_token=matrix(width, 6),
        gate=matrix(16, width + 6),
        up=matrix(16, width + 6),
        down=matrix(width, 16),
        out=matrix(len(token_ids), width, sharpness),
        origin=HeadOrigin(
            model_id="toy",
            tokenizer_fingerprint=fingerprint,
            num_answer_tokens=9,
            greedy_acceptance=0.5,
            sampled_acceptance=0.25,
        ),
    )
