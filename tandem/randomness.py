"""All randomness, as a pure function of (seed, position, purpose).

There is no generator to advance or to roll back: a repeated call, another k, a reopened session or other requests in
the batch cannot change what a position draws.
"""

from __future__ import annotations

import enum
import hashlib
import struct

import numpy as np
import numpy.typing as npt

MAX_SEED = 2**64 - 1
_POSITION_BITS = 32  # far more than any context has tokens
# A key's second half: keeps the tokens' numbers apart from any other use of the same seed.
_TOKEN_STREAM = 0x7A6E_64656D
_LARGEST_UNIFORM = np.float32(1.0 - 2.0**-24)  # float32's last step below 1: its logarithm is finite


class Purpose(enum.Enum):
    """What a number is drawn for. Different purposes are independent at the same seed and position."""

    TARGET = b"target"  # the target's own token: plain, recovered or bonus
    ACCEPT = b"accept"  # the acceptance test of a drafted token
    DRAFT = b"draft"  # the draft's token


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) with 53 random bits, for the token at absolute `position` of the text.

    BLAKE2b as a counter-based generator: about 1 us, the same on every platform.
    """
    counter = struct.pack("<QQ", seed, position)
    digest = hashlib.blake2b(counter, digest_size=8, person=purpose.value).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def renewed_uniform(seed: int, position: int, purpose: Purpose, *, text_length: int) -> float:
    """As `uniform`, but another number in each round: `text_length` tokens, one at least, stand when it is drawn.

    For a draft whose length depends on what it drew. A number that is drawn on again would be one of which the last
    draft's length, and by it the choice of k, has told something.
    """
    return uniform(seed, text_length << _POSITION_BITS | position, purpose)


def token_uniforms(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """A number in (0, 1) for each token [vocab_size] at absolute `position`; a token's is the same in any vocabulary.

    Philox is counter-based, and NumPy keeps its raw stream the same across versions and platforms. 32 bits a token.
    """
    return _as_uniforms(_token_bits(seed, position, vocab_size))


def uniforms_of(seed: int, position: int, token_ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Those of `token_uniforms` for a few tokens, one at least."""
    return _as_uniforms(_token_bits(seed, position, int(token_ids.max()) + 1)[token_ids])


def _token_bits(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.uint32]:
    generator = np.random.Philox(key=np.array([seed, _TOKEN_STREAM], dtype=np.uint64), counter=[0, position, 0, 0])
    return generator.random_raw((vocab_size + 1) // 2).view(np.uint32)[:vocab_size]


def _as_uniforms(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    uniforms = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    below_one: npt.NDArray[np.float32] = np.minimum(uniforms, _LARGEST_UNIFORM)
    return below_one
