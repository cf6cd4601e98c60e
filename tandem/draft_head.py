"""A draft head: what may follow a token, by the target's own hidden state at the token before it. One file.

A target's last hidden state, the one that its head turns into logits, says more of what is to come than the few tokens
a table looks at. A draft head reads it, and the token that was chosen by it, and gives a law of the next one: one gated
layer, and rows for the tokens that the target says most (after the MLP speculator, Wertheimer et al. 2024, of one
step). `tandem distill` trains it on the target's own answers. With `state` [W] and a token,

    e = tokens[its place]                       the last row for tokens that it does not know
    h = W_state rms(state) + W_token e
    h = h + W_down (silu(W_gate z) * W_up z)    z = (rms(h), e)
    law = softmax(W_out rms(h))                 over `token_ids`

Matrices are kept in 8 bits, each row with a scale of its own; the norms' weights are multiplied into them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tandem.errors import InvalidRequest

_FORMAT: Final = "tandem draft head 1"
_MATRICES: Final = ("tokens", "from_state", "from_token", "gate", "up", "down", "out")
_LARGEST: Final = 127
RMS_EPSILON: Final = 1e-6

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RoundedMatrix:
    """A matrix [rows, columns] in 8 bits: `values` times its row's `scales` [rows]."""

    values: npt.NDArray[np.int8]
    scales: FloatArray

    @classmethod
    def of(cls, matrix: FloatArray) -> RoundedMatrix:
        scales = np.maximum(np.abs(matrix).max(axis=1), np.finfo(np.float32).tiny) / _LARGEST
        return cls(np.rint(matrix / scales[:, None]).astype(np.int8), scales.astype(np.float32))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dense(self) -> FloatArray:
        product: FloatArray = self.values.astype(np.float32) * self.scales[:, None]
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOrigin:
    """What a draft head was made of, and how often its tokens were accepted in answers that it has not seen: at
    temperature 0, and at 1."""

    model_id: str
    tokenizer_fingerprint: str
    num_answer_tokens: int
    greedy_acceptance: float
    sampled_acceptance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadWeights:
    """See this module. W: width of the state; E: of a token's row; M: of the gated layer; V: tokens it can name."""

    token_ids: npt.NDArray[np.uint32]  # [V], ascending
    tokens: RoundedMatrix  # [V + 1, E]
    from_state: RoundedMatrix  # [W, W]
    from_token: RoundedMatrix  # [W, E]
    gate: RoundedMatrix  # [M, W + E]
    up: RoundedMatrix  # [M, W + E]
    down: RoundedMatrix  # [W, M]
    out: RoundedMatrix  # [V, W]
    origin: HeadOrigin

    @property
    def state_width(self) -> int:
        return self.from_state.shape[1]

    def places(self, token_ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Rows of `tokens` for these ids [n]."""
        wanted = token_ids.astype(np.int64)
        at = np.searchsorted(self.token_ids, wanted).clip(max=len(self.token_ids) - 1)
        return np.where(self.token_ids[at] == wanted, at, len(self.token_ids))

    def save(self, path: Path) -> None:
        """Write the file that `load` reads."""
        tensors: dict[str, npt.NDArray[np.generic]] = {"token_ids": self.token_ids}
        for name, matrix in self._matrices().items():
            tensors[name], tensors[f"{name}.scales"] = matrix.values, matrix.scales
        origin = {field: getattr(self.origin, field) for field in HeadOrigin.__slots__}
        path.write_bytes(save(tensors, {"format": _FORMAT, "origin": json.dumps(origin)}))

    @classmethod
    def load(cls, path: Path) -> DraftHeadWeights:
        """Raises InvalidRequest for what is no such file."""
        try:
            with safe_open(path, framework="numpy") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise InvalidRequest(
                        f"{path} is no draft head of this version: `tandem distill` makes one", param="draft_head"
                    )
                matrices = {
                    name: RoundedMatrix(opened.get_tensor(name), opened.get_tensor(f"{name}.scales"))
                    for name in _MATRICES
                }
                head = cls(
                    token_ids=opened.get_tensor("token_ids"),
                    origin=HeadOrigin(**json.loads(metadata["origin"])),
                    **matrices,
                )
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise InvalidRequest(f"{path} cannot be read as a draft head ({error})", param="draft_head") from error
        if what := head._damage():
            raise InvalidRequest(f"{path} is damaged: {what}", param="draft_head")
        return head

    def _matrices(self) -> Mapping[str, RoundedMatrix]:
        return {name: getattr(self, name) for name in _MATRICES}

    def _damage(self) -> str | None:
        """What is wrong with it, if anything."""
        for name, matrix in self._matrices().items():
            if matrix.values.dtype != np.int8 or matrix.values.ndim != 2:
                return f"{name} is no matrix of 8 bits"
            if matrix.scales.shape != matrix.values.shape[:1] or not bool(np.isfinite(matrix.scales).all()):
                return f"{name} has other scales than rows"
        if self.token_ids.ndim != 1 or bool((np.diff(self.token_ids.astype(np.int64)) <= 0).any()):
            return "its tokens are not in order"
        num_tokens, width = len(self.token_ids), self.state_width
        token_width, inner = self.tokens.shape[1], self.gate.shape[0]
        shapes = {
            "tokens": (num_tokens + 1, token_width),
            "from_state": (width, width),
            "from_token": (width, token_width),
            "gate": (inner, width + token_width),
            "up": (inner, width + token_width),
            "down": (width, inner),
            "out": (num_tokens, width),
        }
        wrong = [name for name, matrix in self._matrices().items() if matrix.shape != shapes[name]]
        return f"{wrong[0]} is {self._matrices()[wrong[0]].shape}, not {shapes[wrong[0]]}" if wrong else None
