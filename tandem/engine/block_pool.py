"""KV cache blocks: allocate, share, free, and find again by the hash of the prefix they hold.

The pool counts; it holds no tensor. A block is *free* (reference count 0) or *held*. A free block that was published
under a prefix hash stays findable until it is handed out for something else; free blocks are reused least recently
freed first, so what was used last is found longest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class PoolExhausted(Exception):
    """No free block is left. The worker answers by evicting a session's cache."""


class BlockPool:
    """Reference-counted blocks, ids 0 to `num_blocks - 1`. Single-threaded: its worker's."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """A free block, its old content forgotten. Raises PoolExhausted."""
        if not self._free:
            raise PoolExhausted
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block, held or free (a free one is revived with its content)."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less; at zero the block is free, and still findable if it was published."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is released more often than it was taken")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if block not in self._hash_by_block:
                self._free.move_to_end(block, last=False)  # holds nothing findable: reuse it first

    def publish(self, block: int, prefix_hash: bytes) -> None:
        """Make a full, finished block findable. The first block published under a hash keeps it."""
        if prefix_hash not in self._block_by_hash and block not in self._hash_by_block:
            self._block_by_hash[prefix_hash] = block
            self._hash_by_block[block] = prefix_hash

    def find(self, prefix_hash: bytes) -> int | None:
        """The block that holds the prefix's last tokens, or None. The caller shares it before it keeps it."""
        return self._block_by_hash.get(prefix_hash)

    def make_writable(self, block: int) -> bool:
        """Whether the caller, a holder, may write into the block; if so it is no longer findable.

        False: others hold it too, so the caller must copy it into a block of its own.
        """
        if self._references[block] > 1:
            return False
        self._forget(block)
        return True

    def _forget(self, block: int) -> None:
        prefix_hash = self._hash_by_block.pop(block, None)
        if prefix_hash is not None:
            del self._block_by_hash[prefix_hash]


def prefix_hashes(token_ids: Sequence[int], *, block_size: int, previous: Sequence[bytes] = ()) -> list[bytes]:
    """A hash for each full block of `token_ids`, each covering everything from the text's start.

    `previous` are the hashes of its first blocks, where known. SHA-256, so that nobody can make another's prefix
    collide with theirs (the cache is shared by all requests).
    """
    hashes = list(previous)
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        digest = hashlib.sha256(hashes[-1] if hashes else b"")
        digest.update(np.asarray(token_ids[start : start + block_size], dtype="<u4").tobytes())
        hashes.append(digest.digest())
    return hashes
