"""A table of n-grams from the target's answers: what it says next, by the last few tokens.

The answers' laws count, not the tokens that were drawn from them: at each place the target's likeliest tokens, with
their probabilities. That says more of the target than as many drawn tokens, and the greedy token is among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.distill.dataset import Example
from tandem.ngram_table import Contexts, NgramTable, Origin, hash_further, keys_of

LONGEST = 4  # tokens of a context; with 600,000 answer tokens, longer ones were seen once and say no more
_CANDIDATES = 4  # likeliest tokens of a law that count
_SHORTER_COUNTS = 1.0  # 0.302 of held-out tokens foretold; with 0: 0.296, with 4: 0.300
_BEFORE = -1  # in place of a token before the text's first


def learn(examples: Sequence[Example], *, origin: Origin, longest: int = LONGEST) -> NgramTable:
    """What the target says after contexts of 1 to `longest` tokens."""
    preceding = np.concatenate([_preceding(example, longest) for example in examples])  # [A, longest], latest first
    candidates = np.concatenate([example.top_ids[:, :_CANDIDATES] for example in examples])
    log_probs = np.concatenate([example.top_log_probs[:, :_CANDIDATES] for example in examples])
    probs = np.exp(log_probs.astype(np.float32))
    hashed = np.zeros(len(preceding), dtype=np.uint64)
    backed_off = np.full(len(preceding), -1, dtype=np.int64)  # what shorter contexts say at each place
    certainty = np.zeros(len(preceding))  # and how sure they are
    found: list[Contexts] = []
    for n in range(longest):
        hashed = hash_further(hashed, preceding[:, n])
        there = preceding[:, n] != _BEFORE
        contexts, first_places = _likeliest(
            keys_of(hashed[there]), candidates[there], probs[there], backed_off[there], certainty[there]
        )
        news = contexts.token_ids != backed_off[there][first_places]
        contexts = Contexts(
            keys=contexts.keys[news], token_ids=contexts.token_ids[news], certainty=contexts.certainty[news]
        )
        found.append(contexts)
        backed_off, certainty = _said(contexts, keys_of(hashed), there, backed_off, certainty)
    return NgramTable(found, origin)


def hits(table: NgramTable, example: Example) -> int:
    """At how many of the answer's places the table names the target's likeliest token."""
    tokens: list[int] = example.token_ids.tolist()
    found = 0
    for place, likeliest in enumerate(example.top_ids[:, 0].tolist(), start=example.prompt_length):
        guess = table.next(tokens[max(0, place - LONGEST) : place])
        found += guess is not None and guess[0] == likeliest
    return found


def _preceding(example: Example, longest: int) -> npt.NDArray[np.int32]:
    """The tokens before each of the answer's, the latest first: [A, longest]."""
    places = example.prompt_length + np.arange(len(example.top_ids))
    at = places[:, None] - 1 - np.arange(longest)
    return np.where(at >= 0, example.token_ids[np.maximum(at, 0)], np.int32(_BEFORE)).astype(np.int32)


def _likeliest(
    keys: npt.NDArray[np.uint32],
    candidates: npt.NDArray[np.int32],
    probs: npt.NDArray[np.float32],
    backed_off: npt.NDArray[np.int64],
    certainty: npt.NDArray[np.float64],
) -> tuple[Contexts, npt.NDArray[np.int64]]:
    """For each distinct key the candidate with the largest sum of probabilities; and the first place of each key.

    What the shorter context says counts as if it had been seen `_SHORTER_COUNTS` times more: a context that was seen
    once knows little (interpolation, as Jelinek and Mercer 1980).
    """
    distinct, first_places, of_place, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
    )
    share = _SHORTER_COUNTS / counts[of_place]  # at each of the key's places, so that they sum up to it
    weights = np.concatenate([probs, (share * certainty)[:, None]], axis=1)
    tokens = np.concatenate([candidates.astype(np.int64), backed_off[:, None]], axis=1)
    tokens = np.maximum(tokens, 0)  # nothing, with the weight nothing
    pairs = np.repeat(of_place.astype(np.int64), tokens.shape[1]) << 32 | tokens.ravel()
    distinct_pairs, of_pair = np.unique(pairs, return_inverse=True)
    mass = np.bincount(of_pair, weights=weights.ravel())
    owners = distinct_pairs >> 32
    ordered = np.lexsort((-mass, owners))  # by key, the largest first
    best = ordered[np.flatnonzero(np.diff(owners[ordered], prepend=-1))]
    seen = counts + _SHORTER_COUNTS * (certainty[first_places] > 0)
    in_255ths = np.clip(np.rint(255.0 * mass[best] / seen), 0, 255).astype(np.uint8)
    token_ids = (distinct_pairs[best] & 0xFFFFFFFF).astype(np.uint32)
    return Contexts(keys=distinct, token_ids=token_ids, certainty=in_255ths), first_places


def _said(
    contexts: Contexts,
    keys: npt.NDArray[np.uint32],
    there: npt.NDArray[np.bool_],
    backed_off: npt.NDArray[np.int64],
    certainty: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """What `contexts` say of each key [A], and how sure they are; or what was said before where they say nothing."""
    if not len(contexts.keys):
        return backed_off, certainty
    at = np.minimum(np.searchsorted(contexts.keys, keys), len(contexts.keys) - 1)
    known = there & (contexts.keys[at] == keys)
    said = np.where(known, contexts.token_ids[at].astype(np.int64), backed_off)
    return said, np.where(known, contexts.certainty[at] / 255.0, certainty)
