"""A draft head as a network that is trained. tandem/draft_head.py has the formula, and the file it becomes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from tandem.draft_head import RMS_EPSILON, DraftHeadWeights, HeadOrigin, RoundedMatrix

_SMALLEST_SIZE = 0.05  # of a typical column; smaller ones are not blown up further


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """How a draft head is trained. All of it decides whether one that is there is the one that is wanted.

    `vocabulary`: tokens that it can name. `most_tokens`: it learns from the first answers, of so many tokens together.
    `overlap` is the share of the loss that is the acceptance itself rather than the divergence; see loss.py.
    """

    vocabulary: int
    token_width: int = 128
    inner: int = 1024
    most_tokens: int = 2_000_000
    epochs: float = 4.0
    batch_rows: int = 1024
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.01
    overlap: float = 0.3
    evaluations: int = 8
    seed: int = 0


class HeadNetwork(torch.nn.Module):
    """A draft head for V tokens of a target of width W. What the target's head has for them, `out`, is not trained.

    It begins as the target's own head: what it gives of a state is that state, and something of the token.
    """

    def __init__(
        self,
        *,
        tokens: torch.Tensor,
        out: torch.Tensor,
        column_sizes: torch.Tensor,
        inner: int,
        seed: int,
    ) -> None:
        """`tokens` [V, E]: see token_rows. `out` [V, W]. `column_sizes` [W]: root mean squares of the states."""
        super().__init__()
        width, token_width = out.shape[1], tokens.shape[1]
        typical = column_sizes.square().mean().sqrt()
        sizes = column_sizes.clamp(min=float(typical) * _SMALLEST_SIZE)
        unknown = tokens.mean(dim=0, keepdim=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = torch.nn.Parameter(torch.cat([tokens, unknown]))
            self.from_state = torch.nn.Linear(width, width, bias=False)
            self.from_token = torch.nn.Linear(token_width, width, bias=False)
            self.gate = torch.nn.Linear(width + token_width, inner, bias=False)
            self.up = torch.nn.Linear(width + token_width, inner, bias=False)
            self.down = torch.nn.Linear(inner, width, bias=False)
        self.gain = torch.nn.Parameter(sizes.clone())  # the last norm's weights
        self.out: torch.Tensor
        self.register_buffer("out", out)
        with torch.no_grad():
            # All columns of h weigh the same, and the gain makes the state of them again.
            self.from_state.weight.copy_(torch.diag(typical / sizes))
            self.down.weight.mul_(0.5)

    def forward(self, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What `out` reads [n, W], of states [n, W] and the tokens' rows in `tokens` [n]; float32."""
        token = F.embedding(places, self.tokens)
        hidden = self.from_state(_rms(states)).float() + self.from_token(token).float()
        seen = torch.cat([_rms(hidden), token], dim=-1)
        hidden = hidden + self.down(F.silu(self.gate(seen)) * self.up(seen)).float()
        return _rms(hidden) * self.gain

    def rounded(self, vocabulary: npt.NDArray[np.int64], origin: HeadOrigin) -> DraftHeadWeights:
        """As it is written, in 8 bits. `vocabulary` [V]: the tokens' ids, ascending."""

        def matrix(values: torch.Tensor) -> RoundedMatrix:
            return RoundedMatrix.of(np.ascontiguousarray(values.detach().float().cpu().numpy()))

        return DraftHeadWeights(
            token_ids=vocabulary.astype(np.uint32),
            tokens=matrix(self.tokens),
            from_state=matrix(self.from_state.weight),
            from_token=matrix(self.from_token.weight),
            gate=matrix(self.gate.weight),
            up=matrix(self.up.weight),
            down=matrix(self.down.weight),
            out=matrix(self.out * self.gain),
            origin=origin,
        )


def token_rows(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """What the target's input embeddings [V, D] say of its tokens in `width` numbers [V, width], of unit size over all.

    Their first principal components; zeros behind them where there are not so many.
    """
    centred = embeddings.float() - embeddings.float().mean(dim=0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # the last ones have most of it
    rows = centred @ directions.flip(1)[:, :width]
    rows = rows / rows.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return F.pad(rows, (0, width - rows.shape[1]))


def _rms(values: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(values, values.shape[-1:], eps=RMS_EPSILON)
