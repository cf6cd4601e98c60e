"""What a target tends to say: after the last n tokens of a text, which tokens come, and how likely. One file, no model.

`tandem distill` makes it from the target's own answers (tandem/distill/ngrams.py). For n from 1 up it holds contexts
of n tokens, each with a few tokens and their shares, and at how many places it was seen. What shorter contexts say
counts as if it had been seen at two places more (interpolation, as Jelinek and Mercer 1980), so a context that was seen
once knows little, and nothing is said twice in the file.

A context is kept as 32 bits of a hash. Among 300,000 contexts a strange one is taken for one of them once in 14,000
lookups, and what comes of it is a guess that the target rejects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tandem.errors import InvalidRequest

_FORMAT: Final = "tandem ngrams 2"
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd (Knuth, TAOCP 6.4)
_MASK: Final = (1 << 64) - 1
_CERTAIN: Final = 255  # a share of 1 as it is stored
_SHORTER_COUNTS: Final = 2.0  # with 1: 1 % fewer of the likeliest tokens foretold, sampled drafts accepted as often
_LARGEST_LAW: Final = 16  # tokens; with 8 a sampled draft is accepted 3 % less often, with 32 1 % more

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """All contexts of one length: where each was seen how often, and what came there, likeliest first."""

    keys: npt.NDArray[np.uint32]  # [C], ascending
    counts: npt.NDArray[np.uint8]  # [C], 255 and more as 255
    sizes: npt.NDArray[np.uint8]  # [C], how many tokens each has
    token_ids: npt.NDArray[np.uint32]  # [E], one context's after the other's
    shares: npt.NDArray[np.uint8]  # [E], in 255ths


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a table was made of."""

    model_id: str
    tokenizer_fingerprint: str
    vocab_size: int
    num_answer_tokens: int


class NgramTable:
    """`contexts[n - 1]` are those of n tokens."""

    def __init__(self, contexts: Sequence[Contexts], origin: Origin) -> None:
        self._contexts = tuple(contexts)
        self._ends = tuple(np.cumsum(one.sizes, dtype=np.int64) for one in contexts)
        self.origin = origin

    @property
    def num_contexts(self) -> int:
        return sum(len(one.keys) for one in self._contexts)

    @property
    def longest(self) -> int:
        """How many of a text's last tokens are looked at."""
        return len(self._contexts)

    def law(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """The tokens that may follow `tokens`, likeliest first, with their probabilities, which sum to less than 1.

        Empty where nothing is known of the last token.
        """
        shares: dict[int, float] = {}
        hashed = 0
        newest_first = reversed(tokens[-len(self._contexts) :])
        for contexts, ends, token_id in zip(self._contexts, self._ends, newest_first, strict=False):
            hashed = ((hashed ^ (token_id + 1)) * _MULTIPLIER) & _MASK
            hashed ^= hashed >> 32
            key = np.uint32(hashed >> 32)
            at = int(np.searchsorted(contexts.keys, key))
            if at == len(contexts.keys) or contexts.keys[at] != key:
                break
            count = int(contexts.counts[at])
            weight = count / (count + _SHORTER_COUNTS)
            shares = {said: (1.0 - weight) * share for said, share in shares.items()}
            end = int(ends[at])
            here = slice(end - int(contexts.sizes[at]), end)
            for said, share in zip(contexts.token_ids[here].tolist(), contexts.shares[here].tolist(), strict=True):
                shares[said] = shares.get(said, 0.0) + weight * share / _CERTAIN
        return sorted(shares.items(), key=lambda one: (-one[1], one[0]))[:_LARGEST_LAW]

    def save(self, path: Path) -> None:
        """Write the file that `load` reads."""
        tensors: dict[str, npt.NDArray[np.generic]] = {}
        narrow = self.origin.vocab_size <= 1 << 16
        for n, contexts in enumerate(self._contexts, start=1):
            tensors[f"keys.{n}"] = contexts.keys
            tensors[f"counts.{n}"] = contexts.counts
            tensors[f"sizes.{n}"] = contexts.sizes
            tensors[f"token_ids.{n}"] = contexts.token_ids.astype(np.uint16 if narrow else np.uint32)
            tensors[f"shares.{n}"] = contexts.shares
        origin = self.origin
        metadata = {
            "format": _FORMAT,
            "model_id": origin.model_id,
            "tokenizer_fingerprint": origin.tokenizer_fingerprint,
            "vocab_size": str(origin.vocab_size),
            "num_answer_tokens": str(origin.num_answer_tokens),
        }
        path.write_bytes(save(tensors, metadata))

    @classmethod
    def load(cls, path: Path) -> NgramTable:
        """Raises InvalidRequest for what is no such file."""
        try:
            with safe_open(path, framework="numpy") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise InvalidRequest(
                        f"{path} is no table of n-grams of this version: `tandem distill` makes one", param="table"
                    )
                longest = sum(name.startswith("keys.") for name in opened.keys())  # noqa: SIM118  (it is no dict)
                contexts = [
                    Contexts(
                        keys=opened.get_tensor(f"keys.{n}"),
                        counts=opened.get_tensor(f"counts.{n}"),
                        sizes=opened.get_tensor(f"sizes.{n}"),
                        token_ids=opened.get_tensor(f"token_ids.{n}").astype(np.uint32),
                        shares=opened.get_tensor(f"shares.{n}"),
                    )
                    for n in range(1, longest + 1)
                ]
                origin = Origin(
                    model_id=metadata["model_id"],
                    tokenizer_fingerprint=metadata["tokenizer_fingerprint"],
                    vocab_size=int(metadata["vocab_size"]),
                    num_answer_tokens=int(metadata["num_answer_tokens"]),
                )
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InvalidRequest(f"{path} cannot be read as a table of n-grams ({error})", param="table") from error
        for one in contexts:
            if what := _damage(one, origin.vocab_size):
                raise InvalidRequest(f"{path} is damaged: {what}", param="table")
        return cls(contexts, origin)


def _damage(contexts: Contexts, vocab_size: int) -> str | None:
    """What is wrong with them, if anything."""
    num_tokens = int(contexts.sizes.sum(dtype=np.int64))
    if len({len(contexts.keys), len(contexts.counts), len(contexts.sizes)}) != 1:
        return "its contexts are not complete"
    if bool((np.diff(contexts.keys.astype(np.int64)) <= 0).any()):
        return "its contexts are not in order"
    if {len(contexts.token_ids), len(contexts.shares)} != {num_tokens}:
        return "its contexts do not have the tokens they should"
    if num_tokens and int(contexts.token_ids.max()) >= vocab_size:
        return "it has a token outside its vocabulary"
    return None


def hash_further(hashed: UInt64Array, token_ids: npt.NDArray[np.int32]) -> UInt64Array:
    """Hashes [A] of contexts that are one older token longer each, `token_ids` [A]; start from zeros."""
    mixed = (hashed ^ (token_ids.astype(np.uint64) + np.uint64(1))) * np.uint64(_MULTIPLIER)  # modulo 2^64
    longer: UInt64Array = mixed ^ (mixed >> np.uint64(32))
    return longer


def keys_of(hashed: UInt64Array) -> npt.NDArray[np.uint32]:
    """The 32 bits that contexts are found by."""
    return (hashed >> np.uint64(32)).astype(np.uint32)
