"""The law a draft samples from, as it crosses the wire: for each drafted token a few (id, probability) pairs.

Exactness needs the very float32 numbers that were sampled from, nothing more: any law will do (see rejection.py).
So the draft samples from its top-m law, renormalised, and sends that: 2 KB for k = 5, m = 50, instead of 983 KB for
five dense rows of 49,152, keeping 95 % of the acceptance at temperature 1 and 99.5 % at 0.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.types import Draft, PackedLaw

# Sums of float32 probabilities of a law of at most 100,000 entries stray from 1 by less than this.
_SUM_TOLERANCE = 1e-3


class MalformedDraft(Exception):
    """A draft that breaks the contract. Its round becomes a draftless one, never a change of rule."""


@dataclass(frozen=True, slots=True)
class SparseLaw:
    """One position's law: distinct `token_ids` [m] (uint32) and their `probs` [m] (float32, sum 1)."""

    token_ids: npt.NDArray[np.uint32]
    probs: npt.NDArray[np.float32]


def draw_sparse(law: SparseLaw, u: float) -> int:
    """The token that a uniform `u` in [0, 1) picks, by inverse CDF in the law's own order."""
    cumulative = law.probs.astype(np.float64).cumsum()
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(law.token_ids[min(index, len(law.token_ids) - 1)])


def pack(laws: Sequence[SparseLaw]) -> PackedLaw:
    """Laws of k positions as three byte strings."""
    return PackedLaw(
        np.asarray([len(law.token_ids) for law in laws], dtype="<u4").tobytes(),
        b"".join(law.token_ids.astype("<u4", copy=False).tobytes() for law in laws),
        b"".join(law.probs.astype("<f4", copy=False).tobytes() for law in laws),
    )


def listed(packed: PackedLaw | None) -> list[tuple[int, float]]:
    """The first position of a law as pairs of token and probability, in its order; empty where there is none, or it is
    no law."""
    if packed is None or len(packed.sizes) < 4:
        return []
    size = int.from_bytes(packed.sizes[:4], "little")
    if len(packed.token_ids) < 4 * size or len(packed.probs) < 4 * size:
        return []
    ids = np.frombuffer(packed.token_ids, dtype="<u4", count=size)
    probs = np.frombuffer(packed.probs, dtype="<f4", count=size)
    if not bool(np.isfinite(probs).all()) or bool((probs < 0.0).any()):
        return []
    return list(zip(ids.tolist(), probs.tolist(), strict=True))


def unpack(draft: Draft, *, vocab_size: int) -> list[SparseLaw] | None:
    """The laws of a draft's tokens, checked; None for a deterministic drafter. Raises MalformedDraft."""
    if any(token_id >= vocab_size for token_id in draft.token_ids):
        raise MalformedDraft(f"a drafted token id is outside the vocabulary of {vocab_size}")
    if draft.law is None:
        return None
    packed = draft.law
    if len(packed.sizes) % 4 or len(packed.token_ids) % 4 or len(packed.probs) != len(packed.token_ids):
        raise MalformedDraft("the law's byte strings do not match each other")
    sizes = np.frombuffer(packed.sizes, dtype="<u4").astype(np.int64)
    ids = np.frombuffer(packed.token_ids, dtype="<u4")
    probs = np.frombuffer(packed.probs, dtype="<f4")
    if len(sizes) != len(draft.token_ids) or int(sizes.sum()) != len(ids):
        raise MalformedDraft("the law does not cover the drafted tokens")
    if not bool(np.isfinite(probs).all()) or bool((probs < 0).any()):
        raise MalformedDraft("the law holds a probability that is negative or not finite")
    if len(ids) and int(ids.max()) >= vocab_size:
        raise MalformedDraft(f"the law holds a token id outside the vocabulary of {vocab_size}")
    laws = []
    ends = np.cumsum(sizes)
    for end, size, token_id in zip(ends.tolist(), sizes.tolist(), draft.token_ids, strict=True):
        law = SparseLaw(ids[end - size : end], probs[end - size : end])
        if abs(float(law.probs.sum(dtype=np.float64)) - 1.0) > _SUM_TOLERANCE:
            raise MalformedDraft("a law does not sum to 1")
        if len(np.unique(law.token_ids)) != size:
            raise MalformedDraft("a law names a token twice")
        if not bool((law.probs[law.token_ids == token_id] > 0.0).any()):
            raise MalformedDraft("a law gives its drafted token no probability")
        laws.append(law)
    return laws
