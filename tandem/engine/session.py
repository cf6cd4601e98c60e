"""One text at one model: its tokens, and how many of them are in the KV cache.

The tokens are the truth; the cache is a copy that may lag behind, be rolled back, or be dropped at any time, since
every forward computes whatever follows `cached`. That is why rollback, rejection, eviction and a repeated message
need no branches of their own. All methods run on the thread that owns the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.block_pool import BlockPool, PoolExhausted, prefix_hashes
from tandem.errors import OutOfStep


class Session:
    """Tokens [0, cached) have their keys and values in `blocks`; tokens [0, committed) are no longer guesses."""

    def __init__(self, pool: BlockPool, token_ids: Sequence[int], prompt_length: int | None = None) -> None:
        """A text of `token_ids`, the first `prompt_length` of which (default: all) are the prompt."""
        self._pool = pool
        self._prompt_length = len(token_ids) if prompt_length is None else prompt_length
        self.tokens = list(token_ids)
        self.committed = len(self.tokens)
        self.cached = 0
        self.blocks: list[int] = []
        self._hashes: list[bytes] = []  # of the first full blocks of the committed tokens, as far as computed
        self._published = 0  # how many of `blocks`, from the first, were offered under their hash

    @property
    def decode_start(self) -> int:
        """The first position that is not prefilled by whole blocks: where the prompt's last block begins."""
        return max(0, self._prompt_length - 1) // self._pool.block_size * self._pool.block_size

    def advance(self, keep_length: int, new_tokens: Sequence[int]) -> None:
        """Keep the first `keep_length` tokens and append `new_tokens`; all of them are then committed.

        Raises OutOfStep when the session holds fewer than `keep_length` tokens.
        """
        if keep_length > len(self.tokens):
            raise OutOfStep(f"the session holds {len(self.tokens)} tokens, the message wants to keep {keep_length}")
        self.truncate(keep_length)
        self.tokens.extend(new_tokens)
        self.committed = len(self.tokens)

    def guess(self, token_ids: Sequence[int]) -> None:
        """Append drafted tokens; the next `advance` decides which of them stay."""
        self.tokens.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Forget everything from token `length` on."""
        del self.tokens[length:]
        self.committed = min(self.committed, length)
        del self._hashes[length // self._pool.block_size :]
        self.rewind(length)

    def rewind(self, cached: int) -> None:
        """Keep the cache of at most the first `cached` tokens."""
        self.cached = min(self.cached, cached)
        keep = -(-self.cached // self._pool.block_size)
        for block in self.blocks[keep:]:
            self._pool.release(block)
        del self.blocks[keep:]
        self._published = min(self._published, self.cached // self._pool.block_size)

    def release(self) -> None:
        """Drop the whole cache; the tokens stay, so the session can go on (or end) after this."""
        self.rewind(0)

    def fork(self) -> Session:
        """An independent continuation that shares the cache so far, copied on write."""
        twin = Session(self._pool, self.tokens, self._prompt_length)
        twin.committed, twin.cached, twin.blocks = self.committed, self.cached, list(self.blocks)
        twin._hashes, twin._published = list(self._hashes), self._published
        for block in twin.blocks:
            self._pool.share(block)
        return twin

    def take_over(self, fork: Session) -> None:
        """Go on with what a fork of this session has guessed behind the tokens of both, which must be its first ones.

        Its cache moves here where it is the longer one.
        """
        self.guess(fork.tokens[len(self.tokens) :])
        if fork.cached > self.cached:
            self.release()
            self.blocks, fork.blocks = fork.blocks, []
            self.cached, fork.cached = fork.cached, 0
            self._published = fork._published

    def reuse_prefix(self, num_rows: int) -> None:
        """Take over cached blocks that hold the very next tokens, wherever they were computed.

        Leaves the last `num_rows` tokens to compute, whose logits are wanted.
        """
        size = self._pool.block_size
        usable = min(self.committed, len(self.tokens) - num_rows) // size
        if self.cached // size >= usable:
            return
        self._extend_hashes()
        while self.cached // size < usable:
            block = self._pool.find(self._hashes[self.cached // size])
            if block is None:
                return
            self.rewind(self.cached // size * size)  # a block computed in part gives way to the whole one
            self._pool.share(block)
            self.blocks.append(block)
            self.cached += size
            self._published = len(self.blocks)

    def reserve(self, length: int) -> tuple[int, int] | None:
        """Make blocks writable for tokens [cached, length).

        Returns the (source, destination) blocks to copy before anything else happens to the pool, where the block
        that token `cached` falls into is shared. Raises PoolExhausted, with nothing changed.
        """
        size = self._pool.block_size
        index = self.cached // size
        copy_on_write = self.cached % size > 0 and not self._pool.make_writable(self.blocks[index])
        num_new = -(-length // size) - len(self.blocks)
        if self._pool.num_free < num_new + copy_on_write:
            raise PoolExhausted
        copy = None
        if copy_on_write:
            copy = (self.blocks[index], self._pool.allocate())
            self.blocks[index] = copy[1]
            self._pool.release(copy[0])
        self.blocks += [self._pool.allocate() for _ in range(num_new)]
        return copy

    def computed(self, length: int) -> None:
        """Tokens [0, length) are now in the cache; full committed blocks become findable by others."""
        self.cached = length
        full = min(self.cached, self.committed) // self._pool.block_size
        if full > self._published:
            self._extend_hashes()
            for index in range(self._published, full):
                self._pool.publish(self.blocks[index], self._hashes[index])
            self._published = full

    def _extend_hashes(self) -> None:
        committed = self.tokens[: self.committed]
        self._hashes = prefix_hashes(committed, block_size=self._pool.block_size, previous=self._hashes)
