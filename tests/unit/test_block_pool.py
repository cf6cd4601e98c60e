"""BlockPool by example. test_session.py drives it at random through sessions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.block_pool import BlockPool, PoolExhausted, prefix_hashes

HASH, OTHER = b"a" * 32, b"b" * 32


def make_pool(num_blocks: int = 3) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=4)


def test_a_pool_without_blocks_or_without_room_in_them_is_refused() -> None:
    for num_blocks, block_size in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match="at least one block"):
            BlockPool(num_blocks=num_blocks, block_size=block_size)


def test_every_block_can_be_allocated_once_and_then_the_pool_is_exhausted() -> None:
    pool = make_pool()
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    assert (pool.num_free, pool.num_held) == (0, 3)
    with pytest.raises(PoolExhausted):
        pool.allocate()


def test_a_block_is_free_again_when_its_last_holder_lets_go() -> None:
    pool = make_pool()
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.references(block), pool.num_held) == (1, 1)
    pool.release(block)
    assert (pool.references(block), pool.num_held) == (0, 0)


def test_releasing_more_often_than_taking_is_an_error_and_changes_nothing() -> None:
    pool = make_pool()
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ValueError, match="more often"):
        pool.release(block)
    assert (pool.references(block), pool.num_free) == (0, 3)


def test_a_published_block_is_found_while_held_and_after_it_is_freed() -> None:
    pool = make_pool()
    block = pool.allocate()
    assert pool.find(HASH) is None
    pool.publish(block, HASH)
    assert pool.find(HASH) == block
    pool.release(block)
    assert pool.find(HASH) == block


def test_a_free_block_that_is_shared_comes_back_to_life() -> None:
    pool = make_pool()
    block = pool.allocate()
    pool.publish(block, HASH)
    pool.release(block)
    pool.share(block)
    assert (pool.references(block), pool.num_free) == (1, 2)
    assert block not in {pool.allocate(), pool.allocate()}


def test_a_block_handed_out_anew_is_no_longer_found() -> None:
    pool = make_pool(num_blocks=1)
    block = pool.allocate()
    pool.publish(block, HASH)
    pool.release(block)
    assert pool.allocate() == block
    assert pool.find(HASH) is None


def test_blocks_that_hold_nothing_findable_are_reused_before_those_that_do() -> None:
    pool = make_pool()
    kept, dull, other = pool.allocate(), pool.allocate(), pool.allocate()
    pool.publish(kept, HASH)
    pool.publish(other, OTHER)
    for block in (kept, dull, other):
        pool.release(block)
    assert pool.allocate() == dull
    assert pool.allocate() == kept  # then the least recently freed
    assert pool.find(OTHER) == other


def test_the_first_block_published_under_a_hash_keeps_it() -> None:
    pool = make_pool()
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, HASH)
    pool.publish(second, HASH)
    assert pool.find(HASH) == first
    pool.release(second)
    assert pool.allocate() != first
    assert pool.find(HASH) == first


def test_a_block_keeps_the_hash_it_was_first_published_under() -> None:
    pool = make_pool()
    block = pool.allocate()
    pool.publish(block, HASH)
    pool.publish(block, OTHER)
    assert (pool.find(HASH), pool.find(OTHER)) == (block, None)


def test_the_only_holder_may_write_and_the_block_is_then_no_longer_found() -> None:
    pool = make_pool()
    block = pool.allocate()
    pool.publish(block, HASH)
    assert pool.make_writable(block)
    assert pool.find(HASH) is None


def test_a_shared_block_may_not_be_written_and_stays_findable() -> None:
    pool = make_pool()
    block = pool.allocate()
    pool.publish(block, HASH)
    pool.share(block)
    assert not pool.make_writable(block)
    assert pool.find(HASH) == block


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@given(tokens=TOKENS, size=st.integers(1, 5), known=st.integers(0, 30))
def test_hashes_are_one_per_full_block_and_the_same_when_continued(tokens: list[int], size: int, known: int) -> None:
    hashes = prefix_hashes(tokens, block_size=size)
    assert len(hashes) == len(tokens) // size
    assert prefix_hashes(tokens, block_size=size, previous=hashes[:known]) == hashes


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30), size=st.integers(1, 5), data=st.data())
def test_a_hash_covers_every_token_up_to_its_block_and_none_behind_it(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    changed = data.draw(st.integers(0, len(tokens) - 1))
    others = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
    same = [a == b for a, b in zip(*(prefix_hashes(text, block_size=size) for text in (tokens, others)), strict=True)]
    assert same == [block < changed // size for block in range(len(tokens) // size)]


def test_hashes_do_not_depend_on_the_integer_type_of_the_tokens() -> None:
    as_array = prefix_hashes(list(np.array([1, 2, 3], dtype=np.int64)), block_size=3)
    assert as_array == prefix_hashes([1, 2, 3], block_size=3)
