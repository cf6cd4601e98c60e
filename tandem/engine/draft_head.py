"""What a draft head says (tandem/draft_head.py has the formula): on the target's device, beside the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from tandem.draft_head import RMS_EPSILON, DraftHeadWeights, RoundedMatrix
from tandem.draft_law import SparseLaw
from tandem.errors import InvalidRequest
from tandem.types import ModelInfo

LARGEST_LAW: Final = 32  # tokens


class DraftHead(Protocol):
    """Says what may follow. Not thread-safe: the model's thread owns it."""

    def laws(self, states: torch.Tensor, token_ids: Sequence[int]) -> list[SparseLaw]:
        """For each of `token_ids` [n], chosen by the target at `states` [n, W]: the likeliest tokens behind it with
        their probabilities, likeliest first. What is left to all other tokens is missing from their sum."""


Chosen = tuple[torch.Tensor, int]  # a hidden state [W], and the token that was chosen by it


def next_laws(head: DraftHead, chosen: list[Chosen]) -> list[SparseLaw]:
    """What may follow each of these tokens."""
    return head.laws(torch.stack([state for state, _ in chosen]), [token_id for _, token_id in chosen])


class TorchDraftHead:
    """Any device; the reference. `dtype` is that of the arithmetic."""

    def __init__(self, weights: DraftHeadWeights, *, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        def placed(matrix: RoundedMatrix) -> torch.Tensor:
            return torch.from_numpy(matrix.dense()).to(device, dtype)

        self._weights = weights
        self._tokens, self._out = placed(weights.tokens), placed(weights.out)
        self._from_state, self._from_token = placed(weights.from_state), placed(weights.from_token)
        self._gate, self._up, self._down = placed(weights.gate), placed(weights.up), placed(weights.down)

    def logits(self, states: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [n, V] of the tokens that the head knows, float32."""
        places = torch.from_numpy(self._weights.places(np.asarray(token_ids, dtype=np.int64)))
        token = self._tokens[places.to(self._tokens.device)]
        hidden = _rms(states.to(self._tokens)) @ self._from_state.T + token @ self._from_token.T
        seen = torch.cat([_rms(hidden), token], dim=-1)
        hidden = hidden + (F.silu(seen @ self._gate.T) * (seen @ self._up.T)) @ self._down.T
        return (_rms(hidden) @ self._out.T).float()

    @torch.inference_mode()
    def laws(self, states: torch.Tensor, token_ids: Sequence[int]) -> list[SparseLaw]:
        probs = self.logits(states, token_ids).softmax(dim=-1)
        top = probs.topk(min(LARGEST_LAW, probs.shape[-1]), dim=-1)
        return as_laws(self._weights.token_ids, top.indices.cpu().numpy(), top.values.cpu().numpy())


def as_laws(
    token_ids: npt.NDArray[np.uint32], places: npt.NDArray[np.integer], probs: npt.NDArray[np.float32]
) -> list[SparseLaw]:
    """Rows of places in `token_ids` [n, m] and their probabilities [n, m], likeliest first, as laws."""
    return [SparseLaw(token_ids[row], one.copy()) for row, one in zip(places, probs, strict=True)]


def read_draft_head(path: Path, *, model: ModelInfo, state_width: int) -> DraftHeadWeights:
    """The head in a file. Raises InvalidRequest where it is none, or was made for another target."""
    weights = DraftHeadWeights.load(path)
    if weights.origin.tokenizer_fingerprint != model.tokenizer_fingerprint:
        raise InvalidRequest(
            f"the draft head's tokenizer ({weights.origin.model_id}: {weights.origin.tokenizer_fingerprint}) is not "
            f"the target's ({model.model_id}: {model.tokenizer_fingerprint})",
            param="draft_head",
        )
    if weights.state_width != state_width:
        raise InvalidRequest(
            f"the draft head reads states of {weights.state_width} numbers, the target's have {state_width}; "
            "`tandem distill` makes one for this target",
            param="draft_head",
        )
    return weights


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + RMS_EPSILON)
