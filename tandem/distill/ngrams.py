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
_CANDIDATES = 16  # likeliest tokens of a law that count; with 8, greedy 0.300 and sampled 0.271, not 0.304 and 0.276
_LEAST_SHARE = 0.02
# By the length of the context. Long contexts that were seen once are most of them, 60 % of the file, and sampled drafts
# are accepted as often without (0.250).
_MOST_TOKENS = (16, 8)  # and so on
_LEAST_COUNT = (1, 1, 2)  # and so on
_BEFORE = -1  # in place of a token before the text's first


def learn(examples: Sequence[Example], *, origin: Origin, longest: int = LONGEST) -> NgramTable:
    """What the target says after contexts of 1 to `longest` tokens."""
    preceding = np.concatenate([_preceding(example, longest) for example in examples])  # [A, longest], latest first
    candidates = np.concatenate([example.top_ids[:, :_CANDIDATES] for example in examples])
    log_probs = np.concatenate([example.top_log_probs[:, :_CANDIDATES] for example in examples])
    probs = np.exp(log_probs.astype(np.float32))
    hashed = np.zeros(len(preceding), dtype=np.uint64)
    found: list[Contexts] = []
    for n in range(longest):
        hashed = hash_further(hashed, preceding[:, n])
        there = preceding[:, n] != _BEFORE
        found.append(
            _contexts(
                keys_of(hashed[there]),
                candidates[there],
                probs[there],
                most_tokens=_MOST_TOKENS[min(n, len(_MOST_TOKENS) - 1)],
                least_count=_LEAST_COUNT[min(n, len(_LEAST_COUNT) - 1)],
            )
        )
    return NgramTable(found, origin)


def hits(table: NgramTable, example: Example) -> int:
    """At how many of the answer's places the table names the target's likeliest token."""
    tokens: list[int] = example.token_ids.tolist()
    found = 0
    for place, likeliest in enumerate(example.top_ids[:, 0].tolist(), start=example.prompt_length):
        law = table.law(tokens[max(0, place - table.longest) : place])
        found += bool(law) and law[0][0] == likeliest
    return found


def _preceding(example: Example, longest: int) -> npt.NDArray[np.int32]:
    """The tokens before each of the answer's, the latest first: [A, longest]."""
    places = example.prompt_length + np.arange(len(example.top_ids))
    at = places[:, None] - 1 - np.arange(longest)
    return np.where(at >= 0, example.token_ids[np.maximum(at, 0)], np.int32(_BEFORE)).astype(np.int32)


def _contexts(
    keys: npt.NDArray[np.uint32],
    candidates: npt.NDArray[np.int32],
    probs: npt.NDArray[np.float32],
    *,
    most_tokens: int,
    least_count: int,
) -> Contexts:
    """The mean law of each distinct key of `keys` [A], from the laws at its places [A, candidates]."""
    _, of_place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    often = counts[of_place] >= least_count
    keys, candidates, probs = keys[often], candidates[often], probs[often]
    distinct, of_place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    pairs = np.repeat(of_place.astype(np.int64), candidates.shape[1]) << 32 | candidates.ravel()
    distinct_pairs, of_pair = np.unique(pairs, return_inverse=True)
    owners = distinct_pairs >> 32
    shares = np.bincount(of_pair, weights=probs.ravel()) / counts[owners]
    by_owner = np.lexsort((-shares, owners))  # likeliest first
    owners, shares = owners[by_owner], shares[by_owner]
    token_ids = (distinct_pairs[by_owner] & 0xFFFFFFFF).astype(np.uint32)
    rank = np.arange(len(owners)) - np.searchsorted(owners, owners)
    said = (shares >= _LEAST_SHARE) & (rank < most_tokens)
    sizes = np.bincount(owners[said], minlength=len(distinct))
    known = sizes > 0
    return Contexts(
        keys=distinct[known],
        counts=np.minimum(counts[known], 255).astype(np.uint8),
        sizes=sizes[known].astype(np.uint8),
        token_ids=token_ids[said],
        shares=np.clip(np.rint(255.0 * shares[said]), 1, 255).astype(np.uint8),
    )
