"""The one contract between scheduling and models: a ragged batch in, logits out.

Legend for shapes: S sequences, T packed tokens of all of them, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Tokens of several sequences, packed one after another without padding.

    Sequence s owns packed tokens `sequence_starts[s] : sequence_starts[s + 1]`. Its first `past_lens[s]` tokens are
    in the cache already, in blocks `block_table[block_starts[s] : block_starts[s + 1]]`; the packed tokens follow
    them at positions past_lens[s], past_lens[s] + 1, ..., and the blocks have room for them.

    Tokens from position `decode_starts[s]` on are the sequence's own continuation. A runner whose kernels round a
    token by token computation otherwise than one of many tokens computes these as if each came alone, so that their
    logits do not depend on how many were guessed. The prompt before it comes in pieces that end at whole blocks.
    """

    token_ids: Int32Array  # [T]
    position_ids: Int32Array  # [T]
    past_lens: Int32Array  # [S]
    sequence_starts: Int32Array  # [S + 1]
    decode_starts: Int32Array  # [S]
    block_table: Int32Array  # [sum of blocks]
    block_starts: Int32Array  # [S + 1]
    logits_rows: Int32Array  # [R], indices into the packed tokens, ascending

    @property
    def num_sequences(self) -> int:
        return len(self.past_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Choosing:
    """How the tokens behind a sequence will be chosen: drawn from the law of the `law_size` likeliest ones at this
    temperature (0: the likeliest), by one uniform number each, as draw_sparse in tandem/draft_law.py takes it."""

    temperature: float
    law_size: int
    uniforms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a forward computed behind a batch: n tokens of each sequence.

    `logits` [S * (1 + n), vocab]: of each sequence's last token of the batch, then of those behind it, whose keys and
    values are written, too. `token_ids` [S][n]: nearly always what the one who chooses by these logits chooses.
    """

    logits: torch.Tensor
    token_ids: list[list[int]]


class AheadRunner(Protocol):
    """A runner that can go on behind a batch by itself, which saves a GPU the way to the host and back."""

    def forward_ahead(self, batch: RaggedBatch, choosing: Sequence[Choosing]) -> Ahead | None:
        """As ModelRunner.forward for a batch that wants the last row of each sequence, and on behind it.

        For at most as many tokens as each of `choosing` [S] has numbers; the blocks have room for them. None, with
        nothing done: not for this batch.
        """


class ModelRunner(Protocol):
    """A model and the memory of its KV cache. Not thread-safe: one thread owns it."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without padding: the width of the logits."""

    @property
    def context_length(self) -> int:
        """Most tokens a sequence may have."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""

    @property
    def num_blocks(self) -> int:
        """KV blocks at hand, ids 0 to num_blocks - 1."""

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the batch's keys and values into its blocks; return logits [R, vocab], float32.

        The tensor may be reused by the next call. Raises nothing for a batch that keeps the contract.
        """

    def step_size(self, num_sequences: int, *, tokens_each: int) -> int:
        """As how many tokens a step of continuations is computed: an engine with favourite sizes fills up to one."""

    @property
    def last_step_size(self) -> int:
        """As how many the last forward was computed."""

    @property
    def last_states(self) -> torch.Tensor:
        """Hidden states [R, W] that the head made the last forward's logits of, float32; the next call may reuse it."""

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole KV blocks, pair by pair, before the next forward."""
