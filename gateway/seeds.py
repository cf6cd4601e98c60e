"""The seeds of a request's answers."""

from __future__ import annotations

import hashlib
import secrets

_DRAWN_BITS = 53  # a drawn seed is named in the response, and JavaScript reads integers exactly up to here


def draw_seed() -> int:
    """A seed for a request that gives none."""
    return secrets.randbits(_DRAWN_BITS)


def seed_of_choice(seed: int, index: int) -> int:
    """The seed, as the services take it, of a request's answer number `index`: a pure function of both.

    Answer 0 has the request's own seed (negative ones wrap, as the wire has unsigned ones), so that it is what a
    request for one answer gives. The others' are hashes: neighbouring seeds share no answers.
    """
    unsigned = seed % 2**64
    if index == 0:
        return unsigned
    digest = hashlib.blake2b(unsigned.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
