"""What a target tends to say: after the last n tokens of a text, its likeliest next one. One file, no model.

`tandem distill` makes it from the target's own answers (tandem/distill/ngrams.py). For n from 1 up it holds contexts
of n tokens, each with one token and how likely that was; those only that say something else than shorter ones do.

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

_FORMAT: Final = "tandem ngrams 1"
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, odd (Knuth, TAOCP 6.4)
_MASK: Final = (1 << 64) - 1
_SURE: Final = 255  # certainty as it is stored

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """All contexts of one length."""

    keys: npt.NDArray[np.uint32]  # [C], ascending
    token_ids: npt.NDArray[np.uint32]  # [C]
    certainty: npt.NDArray[np.uint8]  # [C], in 255ths


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
        self.origin = origin

    @property
    def num_contexts(self) -> int:
        return sum(len(one.keys) for one in self._contexts)

    def next(self, tokens: Sequence[int]) -> tuple[int, float] | None:
        """The token that followed the longest known end of `tokens`, and how likely it was there, from 0 to 1."""
        keys: list[int] = []
        hashed = 0
        for token_id in reversed(tokens[-len(self._contexts) :]):
            hashed = ((hashed ^ (token_id + 1)) * _MULTIPLIER) & _MASK
            hashed ^= hashed >> 32
            keys.append(hashed >> 32)
        for contexts, key in zip(reversed(self._contexts[: len(keys)]), reversed(keys), strict=True):
            at = int(np.searchsorted(contexts.keys, np.uint32(key)))
            if at < len(contexts.keys) and int(contexts.keys[at]) == key:
                return int(contexts.token_ids[at]), int(contexts.certainty[at]) / _SURE
        return None

    def save(self, path: Path) -> None:
        """Write the file that `load` reads."""
        tensors: dict[str, npt.NDArray[np.generic]] = {}
        narrow = self.origin.vocab_size <= 1 << 16
        for n, contexts in enumerate(self._contexts, start=1):
            tensors[f"keys.{n}"] = contexts.keys
            tensors[f"token_ids.{n}"] = contexts.token_ids.astype(np.uint16 if narrow else np.uint32)
            tensors[f"certainty.{n}"] = contexts.certainty
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
                    raise InvalidRequest(f"{path} is no table of n-grams: `tandem distill` makes one", param="table")
                longest = sum(name.startswith("keys.") for name in opened.keys())  # noqa: SIM118  (it is no dict)
                contexts = [
                    Contexts(
                        keys=opened.get_tensor(f"keys.{n}"),
                        token_ids=opened.get_tensor(f"token_ids.{n}").astype(np.uint32),
                        certainty=opened.get_tensor(f"certainty.{n}"),
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
            sizes = {len(one.keys), len(one.token_ids), len(one.certainty)}
            if len(sizes) != 1 or bool((np.diff(one.keys.astype(np.int64)) <= 0).any()):
                raise InvalidRequest(f"{path} is damaged: its contexts are not in order", param="table")
            if len(one.token_ids) and int(one.token_ids.max()) >= origin.vocab_size:
                raise InvalidRequest(f"{path} is damaged: it has a token outside its vocabulary", param="table")
        return cls(contexts, origin)


def hash_further(hashed: UInt64Array, token_ids: npt.NDArray[np.int32]) -> UInt64Array:
    """Hashes [A] of contexts that are one older token longer each, `token_ids` [A]; start from zeros."""
    mixed = (hashed ^ (token_ids.astype(np.uint64) + np.uint64(1))) * np.uint64(_MULTIPLIER)  # modulo 2^64
    longer: UInt64Array = mixed ^ (mixed >> np.uint64(32))
    return longer


def keys_of(hashed: UInt64Array) -> npt.NDArray[np.uint32]:
    """The 32 bits that contexts are found by."""
    return (hashed >> np.uint64(32)).astype(np.uint32)
