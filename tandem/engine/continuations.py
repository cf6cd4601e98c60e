"""How the tokens of a continuation are fed to OpenVINO, so that a text's bits do not depend on how they were guessed.

OpenVINO attends by one kernel for a sequence's single new token and by another for several, whose last bits differ;
rounding activations to 8 bits makes that up to 2 in SmolLM2-135M's logits, and one greedy token in 15 another. Each
kernel by itself gives the same bits however many tokens it is given. So all tokens of continuations go to one of them.
Which one is a matter of speed. Milliseconds of SmolLM2-135M in 8 bits, one thread:

    context             256                   1024                  1792
    new tokens      1     5     9         1     5     9         1     5     9
    one by one   13.1  17.2  23.3      16.1  25.5  37.1      19.3  34.4  51.2
    in blocks    14.5  16.3  20.6      19.2  21.6  27.7      22.7  26.5  34.3
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tandem.engine.runner import RaggedBatch

_NO_MATTER = 0  # the token that keeps another company
# Of a step's tokens: more than this is not filled up; so many are added at most; so often in a row where a smaller size
# would do (replayed on bundled answers, 8 and 16 times are equal, 4 is 1 % slower).
_LARGEST_FILLED, _MOST_FILLED, _PATIENCE = 64, 8, 8


def one_by_one(batch: RaggedBatch) -> RaggedBatch:
    """The same tokens, with every token of a continuation as a sequence of its own, on the same blocks.

    That works since a layer stores all new keys before it attends.
    """
    lengths = np.diff(batch.sequence_starts)
    prefilled = np.clip(batch.decode_starts - batch.past_lens, 0, lengths)  # [S], tokens of the prompt's whole blocks
    singles = lengths - prefilled
    pieces = singles + (prefilled > 0)
    sequence = np.repeat(np.arange(len(lengths)), pieces)  # [pieces], the sequence each is of
    nth = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # [pieces], counted in its sequence
    whole = (nth == 0) & (prefilled[sequence] > 0)
    piece_lengths = np.where(whole, prefilled[sequence], 1)
    blocks = np.diff(batch.block_starts)
    first_blocks = batch.block_starts[:-1]
    table = [batch.block_table[first : first + count] for first, count in zip(first_blocks, blocks, strict=True)]
    starts = np.cumsum(np.append(0, piece_lengths)).astype(np.int32)
    return replace(
        batch,
        past_lens=batch.position_ids[starts[:-1]],
        sequence_starts=starts,
        decode_starts=batch.decode_starts[sequence],
        block_table=np.concatenate([table[index] for index in sequence]),
        block_starts=np.cumsum(np.append(0, blocks[sequence])).astype(np.int32),
    )


def in_blocks(batch: RaggedBatch, *, spare_block: int) -> RaggedBatch:
    """The same tokens, with every continuation as a sequence of two tokens at least.

    A lone one is followed by a companion whose logits nobody asks for. What that leaves in the cache is at the next
    position, which is written anew before it counts; where that position's block is not there yet, it is in
    `spare_block`.
    """
    token_ids: list[int] = []
    position_ids: list[int] = []
    past_lens: list[int] = []
    starts, block_starts, decode_starts = [0], [0], []
    blocks: list[int] = []
    packed_at: list[int] = []  # where each token of `batch` went
    # Lists, since there are few numbers: an operation on an array takes as long as twenty on a list.
    given_ids, given_positions, given_blocks = (
        batch.token_ids.tolist(),
        batch.position_ids.tolist(),
        batch.block_table.tolist(),
    )
    firsts, given_block_starts = batch.sequence_starts.tolist(), batch.block_starts.tolist()
    for s, (past, decode_start) in enumerate(zip(batch.past_lens.tolist(), batch.decode_starts.tolist(), strict=True)):
        first, last = firsts[s], firsts[s + 1]
        table = given_blocks[given_block_starts[s] : given_block_starts[s + 1]]
        border = first + min(max(decode_start - past, 0), last - first)
        for begin, end in ((first, border), (border, last)):
            if begin == end:
                continue
            packed_at += range(len(token_ids), len(token_ids) + end - begin)
            token_ids += given_ids[begin:end]
            position_ids += given_positions[begin:end]
            blocks += table
            if begin == border and end - begin == 1:
                token_ids.append(_NO_MATTER)
                position_ids.append(past + end - first)
                blocks.append(spare_block)
            past_lens.append(past + begin - first)
            starts.append(len(token_ids))
            decode_starts.append(decode_start)
            block_starts.append(len(blocks))
    return RaggedBatch(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        position_ids=np.asarray(position_ids, dtype=np.int32),
        past_lens=np.asarray(past_lens, dtype=np.int32),
        sequence_starts=np.asarray(starts, dtype=np.int32),
        decode_starts=np.asarray(decode_starts, dtype=np.int32),
        block_table=np.asarray(blocks, dtype=np.int32),
        block_starts=np.asarray(block_starts, dtype=np.int32),
        logits_rows=np.asarray([packed_at[row] for row in batch.logits_rows.tolist()], dtype=np.int32),
    )


class StepSize:
    """To how many tokens a step is filled up.

    OpenVINO prepares every operation anew when a step has another number of tokens than the one before, which takes 4.5
    ms of SmolLM2-135M's 12 (two threads); a token more takes 0.3. So a step keeps the last one's size where that is
    not much too large, and not time and again.
    """

    def __init__(self) -> None:
        self._size = 0
        self._times_too_large = 0

    def fit(self, num_tokens: int) -> int:
        """The size for a step of `num_tokens`: that, or somewhat more."""
        if num_tokens > _LARGEST_FILLED:  # a prefill: another size each time, and long anyway
            return num_tokens
        wanted = favourite_size(num_tokens)
        if 0 <= self._size - num_tokens <= _MOST_FILLED:
            self._times_too_large = self._times_too_large + 1 if wanted < self._size else 0
            if self._times_too_large < _PATIENCE:
                return self._size
        self._size, self._times_too_large = wanted, 0
        return wanted


def filled_up(batch: RaggedBatch, num_tokens: int, *, spare_block: int) -> RaggedBatch:
    """`batch`, and one sequence more, of tokens that nobody asks about, in `spare_block`: `num_tokens` in all."""
    count = num_tokens - batch.num_tokens
    if count == 0:
        return batch
    return replace(
        batch,
        token_ids=np.append(batch.token_ids, np.full(count, _NO_MATTER, dtype=np.int32)),
        position_ids=np.append(batch.position_ids, np.arange(count, dtype=np.int32)),
        past_lens=np.append(batch.past_lens, np.int32(0)),
        sequence_starts=np.append(batch.sequence_starts, np.int32(num_tokens)),
        decode_starts=np.append(batch.decode_starts, np.int32(0)),
        block_table=np.append(batch.block_table, np.int32(spare_block)),
        block_starts=np.append(batch.block_starts, np.int32(len(batch.block_table) + 1)),
    )


def favourite_size(num_tokens: int) -> int:
    """1, 2, 5, 9, 16, 24, 32, ...: plain steps, a draft of 4, a draft of 8, then what several texts need."""
    if num_tokens <= 2 or num_tokens > _LARGEST_FILLED:
        return num_tokens
    return 5 if num_tokens <= 5 else 9 if num_tokens <= 9 else -(-num_tokens // 8) * 8
