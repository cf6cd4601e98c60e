"""What size a step is filled up to, and that filling up changes nothing that is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.continuations import StepSize, filled_up, in_blocks
from tandem.engine.runner import RaggedBatch

SPARE = 99


def batch(*texts: tuple[int, int, int]) -> RaggedBatch:
    """Texts as (past, new tokens, where the continuation begins), one block of 32 tokens each."""
    lengths = [count for _, count, _ in texts]
    return RaggedBatch(
        token_ids=np.arange(sum(lengths), dtype=np.int32) + 100,
        position_ids=np.concatenate([np.arange(past, past + count) for past, count, _ in texts]).astype(np.int32),
        past_lens=np.array([past for past, _, _ in texts], dtype=np.int32),
        sequence_starts=np.cumsum([0, *lengths]).astype(np.int32),
        decode_starts=np.array([start for _, _, start in texts], dtype=np.int32),
        block_table=np.arange(len(texts), dtype=np.int32),
        block_starts=np.arange(len(texts) + 1, dtype=np.int32),
        logits_rows=np.array([end - 1 for end in np.cumsum(lengths)], dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        ([1, 1, 1], [1, 1, 1]),
        ([5, 3, 4, 2, 5], [5, 5, 5, 5, 5]),
        ([9, *[2] * 9], [*[9] * 8, 2, 2]),  # not time and again
        ([9, *[2] * 7, 9, *[2] * 8], [*[9] * 16, 2]),
        ([17, 5], [24, 5]),  # far too large
        ([5, 256, 4], [5, 256, 5]),  # a prefill comes between
    ],
)
def test_a_step_keeps_the_size_of_the_last_one_where_that_will_do(steps: list[int], sizes: list[int]) -> None:
    size = StepSize()
    assert [size.fit(num_tokens) for num_tokens in steps] == sizes


@given(st.lists(st.integers(1, 300), max_size=50))
def test_a_size_is_never_too_small_and_never_much_too_large(steps: list[int]) -> None:
    size = StepSize()
    for num_tokens in steps:
        assert num_tokens <= size.fit(num_tokens) <= num_tokens + 8


def test_what_fills_up_is_a_text_of_its_own_in_the_spare_block() -> None:
    asked = batch((10, 3, 5), (7, 1, 7))
    filled = filled_up(asked, 9, spare_block=SPARE)
    assert filled.num_tokens == 9
    assert filled.token_ids[:4].tolist() == asked.token_ids.tolist()
    assert filled.position_ids[4:].tolist() == [0, 1, 2, 3, 4]
    assert filled.past_lens.tolist() == [10, 7, 0]
    assert filled.block_table[filled.block_starts[2] : filled.block_starts[3]].tolist() == [SPARE]
    assert filled.logits_rows.tolist() == asked.logits_rows.tolist()
    assert filled_up(asked, 4, spare_block=SPARE) is asked


def test_lone_tokens_of_continuations_get_a_companion_behind_them() -> None:
    """A piece of a prompt of one token gets none; it is the same in every run. Rows follow their tokens."""
    fed = in_blocks(batch((10, 1, 5), (7, 3, 5), (31, 1, 64), (3, 3, 5)), spare_block=SPARE)
    assert np.diff(fed.sequence_starts).tolist() == [2, 3, 1, 2, 2]  # the last text: two of its prompt, then a lone one
    assert fed.past_lens.tolist() == [10, 7, 31, 3, 5]
    assert fed.position_ids.tolist() == [10, 11, 7, 8, 9, 31, 3, 4, 5, 6]
    assert fed.token_ids[fed.logits_rows].tolist() == [100, 103, 104, 107]
    held = [fed.block_table[a:b].tolist() for a, b in zip(fed.block_starts, fed.block_starts[1:], strict=False)]
    assert held == [[0, SPARE], [1], [2], [3], [3, SPARE]]
