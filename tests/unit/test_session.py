"""Session by example, then by a machine that drives several sessions on one small pool at random.

The block memory of these tests holds at each position a number that stands for the whole text up to there, as keys
and values do: a block that holds the right tokens after the wrong prefix counts as wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tandem.engine.block_pool import BlockPool, PoolExhausted, prefix_hashes
from tandem.engine.session import Session
from tandem.errors import OutOfStep

SIZE = 4
UNWRITTEN = -1


def marks(tokens: Sequence[int]) -> list[int]:
    """For each position the number that stands for the text up to and with it."""
    return [hash(tuple(tokens[: position + 1])) for position in range(len(tokens))]


class Memory:
    """A pool and what its blocks hold; computes feeds as the worker does."""

    def __init__(self, *, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks=num_blocks, block_size=SIZE)
        self.cells = np.full((num_blocks, SIZE), UNWRITTEN, dtype=np.int64)

    def read(self, session: Session) -> list[int]:
        return [int(mark) for mark in self.cells[session.blocks].reshape(-1)[: session.cached]]

    def compute(self, session: Session, num_tokens: int | None = None) -> int:
        """Compute the next `num_tokens` (default: all) uncached tokens; returns how many blocks were copied."""
        end = len(session.tokens) if num_tokens is None else session.cached + num_tokens
        copy = session.reserve(end)
        if copy is not None:
            self.cells[copy[1]] = self.cells[copy[0]]
        for position in range(session.cached, end):
            self.cells[session.blocks[position // SIZE], position % SIZE] = marks(session.tokens)[position]
        session.computed(end)
        return int(copy is not None)

    def check(self, session: Session) -> None:
        assert self.read(session) == marks(session.tokens)[: session.cached]


def computed_session(memory: Memory, tokens: Sequence[int]) -> Session:
    session = Session(memory.pool, tokens)
    memory.compute(session)
    return session


def test_a_new_session_holds_its_tokens_and_no_block() -> None:
    memory = Memory(num_blocks=4)
    session = Session(memory.pool, [1, 2, 3])
    assert (session.tokens, session.committed, session.cached, session.blocks) == ([1, 2, 3], 3, 0, [])


def test_computing_takes_just_the_blocks_that_the_tokens_need() -> None:
    memory = Memory(num_blocks=4)
    for length, blocks in ((1, 1), (SIZE, 1), (SIZE + 1, 2), (4 * SIZE, 4)):
        session = computed_session(memory, range(length))
        assert len(session.blocks) == memory.pool.num_held == blocks
        memory.check(session)
        session.release()


def test_advance_keeps_accepted_guesses_and_drops_the_rest() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, [1, 2, 3])
    session.guess([7, 8, 9])
    memory.compute(session)
    assert (session.committed, session.cached) == (3, 6)
    session.advance(5, [4])  # 7 and 8 stand, then comes 4
    assert (session.tokens, session.committed, session.cached) == ([1, 2, 3, 7, 8, 4], 6, 5)
    memory.compute(session)
    memory.check(session)


def test_a_repeated_advance_changes_nothing() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, [1, 2, 3])
    for _ in range(3):
        session.advance(3, [4, 5])
        assert session.tokens == [1, 2, 3, 4, 5]
        memory.compute(session)
        memory.check(session)


def test_keeping_more_than_there_is_raises_out_of_step_and_changes_nothing() -> None:
    session = Session(BlockPool(num_blocks=1, block_size=SIZE), [1, 2])
    session.guess([3])
    with pytest.raises(OutOfStep, match="holds 3 tokens, the message wants to keep 4"):
        session.advance(4, [9])
    assert (session.tokens, session.committed) == ([1, 2, 3], 2)


def test_truncation_frees_the_blocks_behind_it() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, range(4 * SIZE))
    session.truncate(SIZE + 1)
    assert (session.cached, len(session.blocks), memory.pool.num_held) == (SIZE + 1, 2, 2)
    session.truncate(SIZE)
    assert (session.cached, len(session.blocks), memory.pool.num_held) == (SIZE, 1, 1)


def test_release_frees_everything_and_the_session_goes_on() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, range(10))
    session.release()
    assert (session.cached, memory.pool.num_held, session.tokens) == (0, 0, list(range(10)))
    memory.compute(session)
    memory.check(session)


def test_an_evicted_session_finds_its_own_blocks_again() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, range(10))
    blocks = list(session.blocks)
    session.release()
    session.reuse_prefix(1)
    assert (session.cached, session.blocks) == (2 * SIZE, blocks[:2])
    memory.check(session)


def test_an_equal_prefix_is_reused_and_always_leaves_a_token_to_compute() -> None:
    memory = Memory(num_blocks=8)
    first = computed_session(memory, range(2 * SIZE))
    same = Session(memory.pool, range(2 * SIZE))
    same.reuse_prefix(1)
    assert same.cached == SIZE
    longer = Session(memory.pool, range(2 * SIZE + 1))
    longer.reuse_prefix(1)
    assert (longer.cached, longer.blocks) == (2 * SIZE, first.blocks)
    other = Session(memory.pool, [99, *range(1, 2 * SIZE + 1)])
    other.reuse_prefix(1)
    assert other.cached == 0


def test_guesses_are_never_published() -> None:
    memory = Memory(num_blocks=8)
    session = computed_session(memory, range(SIZE - 1))
    session.guess(range(SIZE - 1, 3 * SIZE))
    memory.compute(session)
    curious = Session(memory.pool, range(3 * SIZE))
    curious.reuse_prefix(1)
    assert curious.cached == 0
    session.advance(2 * SIZE, [7])  # the guesses stand
    memory.compute(session)
    curious.reuse_prefix(1)
    assert curious.cached == 2 * SIZE
    memory.check(curious)


def test_a_fork_shares_blocks_and_copies_only_the_one_it_writes_into() -> None:
    memory = Memory(num_blocks=8)
    session = computed_session(memory, range(SIZE + 1))
    twin = session.fork()
    assert twin.blocks == session.blocks
    assert memory.pool.num_held == 2
    session.guess([50])
    twin.guess([60])
    assert memory.compute(session) == 1
    assert memory.compute(twin) == 0  # it is the only holder of the original now
    assert (twin.blocks[0], memory.pool.num_held) == (session.blocks[0], 3)
    memory.check(session)
    memory.check(twin)


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    memory = Memory(num_blocks=8)
    session = computed_session(memory, range(SIZE))
    twin = session.fork()
    twin.guess([60])
    assert memory.compute(twin) == 0
    memory.check(session)
    memory.check(twin)


def test_a_session_goes_on_with_what_its_fork_guessed_and_computed() -> None:
    memory = Memory(num_blocks=8)
    session = computed_session(memory, range(SIZE + 1))
    session.guess([50, 51])
    memory.compute(session)
    fork = session.fork()
    fork.truncate(SIZE + 2)
    fork.guess([60, 61, 62])  # 60 in place of 51
    memory.compute(fork, 2)
    session.advance(SIZE + 2, [60])
    session.take_over(fork)
    assert session.tokens == [*range(SIZE + 1), 50, 60, 61, 62]
    assert (session.committed, session.cached) == (SIZE + 3, SIZE + 4)
    memory.check(session)
    fork.release()
    assert memory.pool.num_held == 2
    memory.compute(session)
    session.advance(2 * SIZE, [])
    memory.compute(session, 0)
    curious = Session(memory.pool, [*session.tokens, 9])
    curious.reuse_prefix(1)
    assert curious.cached == 2 * SIZE, "what the fork computed is found under the session's text"
    memory.check(curious)


def test_of_a_fork_that_lost_its_cache_the_tokens_are_taken_over() -> None:
    memory = Memory(num_blocks=8)
    session = computed_session(memory, range(SIZE))
    fork = session.fork()
    fork.guess([60, 61])
    fork.release()
    session.advance(SIZE, [60])
    session.take_over(fork)
    assert (session.tokens, session.cached) == ([*range(SIZE), 60, 61], SIZE)
    memory.check(session)


def test_rolling_back_into_a_published_block_hides_it_before_it_is_overwritten() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, range(SIZE))
    session.advance(SIZE - 1, [77])
    memory.compute(session)
    memory.check(session)
    curious = Session(memory.pool, range(SIZE + 1))
    curious.reuse_prefix(1)
    assert curious.cached == 0


def test_what_is_computed_anew_after_a_rollback_is_published_anew() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, range(2 * SIZE))
    session.advance(1, [7] * (2 * SIZE))
    memory.compute(session)
    curious = Session(memory.pool, session.tokens)
    curious.reuse_prefix(1)
    assert curious.cached == 2 * SIZE
    memory.check(curious)


def test_rolling_back_into_a_block_that_another_took_over_copies_it() -> None:
    memory = Memory(num_blocks=4)
    session = computed_session(memory, range(SIZE))
    other = Session(memory.pool, range(SIZE + 1))
    other.reuse_prefix(1)
    session.advance(SIZE - 1, [77])
    assert memory.compute(session) == 1
    memory.compute(other)
    memory.check(session)
    memory.check(other)


def test_when_the_pool_is_dry_reserve_raises_and_the_session_stays_as_it_was() -> None:
    """There is one block too little in both cases: no block is free, or one, but a copy and a block are needed."""
    for num_blocks in (2, 3):
        check_that_nothing_changes_when_dry(Memory(num_blocks=num_blocks))


def check_that_nothing_changes_when_dry(memory: Memory) -> None:
    session = computed_session(memory, range(SIZE + 2))
    twin = session.fork()
    twin.guess(range(SIZE - 1))
    before = (list(twin.blocks), twin.cached, memory.pool.num_free)
    with pytest.raises(PoolExhausted):
        twin.reserve(len(twin.tokens))
    assert (twin.blocks, twin.cached, memory.pool.num_free) == before
    memory.check(session)
    memory.check(twin)


class Sessions(RuleBasedStateMachine):
    """Any order of what workers and drafters do with sessions. Two token ids and short texts make prefixes collide."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(num_blocks=7)
        self.alive: list[Session] = []
        self.texts: dict[bytes, list[int]] = {}

    tokens = st.lists(st.integers(0, 1), max_size=6)

    @rule(target=sessions, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def open(self, tokens: list[int]) -> Session:
        session = Session(self.memory.pool, tokens)
        self.alive.append(session)
        return session

    @rule(target=sessions, session=sessions)
    def fork(self, session: Session) -> Session:
        assume(len(self.alive) < 5)
        twin = session.fork()
        assert (twin.tokens, twin.committed, twin.cached) == (session.tokens, session.committed, session.cached)
        self.alive.append(twin)
        return twin

    @rule(session=sessions, data=st.data(), tokens=tokens)
    def advance(self, session: Session, data: st.DataObject, tokens: list[int]) -> None:
        keep_length = data.draw(st.integers(1, len(session.tokens)))
        expected = session.tokens[:keep_length] + tokens
        session.advance(keep_length, tokens)
        assert session.tokens == expected
        assert session.committed == len(expected)

    @rule(session=sessions, tokens=tokens)
    def guess(self, session: Session, tokens: list[int]) -> None:
        committed = session.committed
        session.guess(tokens)
        assert session.committed == committed

    @rule(session=sessions, data=st.data(), guessed=tokens, share=st.floats(0, 1))
    def take_over(self, session: Session, data: st.DataObject, guessed: list[int], share: float) -> None:
        """As a prepared draft: a fork goes on from somewhere, and computes some of it; the session follows."""
        fork = session.fork()
        fork.truncate(data.draw(st.integers(1, len(session.tokens))))
        fork.guess(guessed)
        missing = len(fork.tokens) - fork.cached
        with suppress(PoolExhausted):
            self.memory.compute(fork, round(share * missing))
        num_known = data.draw(st.integers(1, len(fork.tokens)))
        num_kept = min(num_known, len(fork.tokens) - len(guessed))
        session.advance(num_kept, fork.tokens[num_kept:num_known])
        cached = max(session.cached, fork.cached)
        session.take_over(fork)
        assert session.tokens == fork.tokens
        assert session.cached == cached
        assert session.committed == num_known
        fork.release()

    @rule(session=sessions, data=st.data())
    def truncate(self, session: Session, data: st.DataObject) -> None:
        session.truncate(data.draw(st.integers(1, len(session.tokens))))

    @rule(session=sessions, data=st.data(), reuse=st.booleans())
    def compute(self, session: Session, data: st.DataObject, reuse: bool) -> None:
        """As the worker: rewind, reuse, reserve (evicting others), compute a chunk or all of it."""
        num_rows = data.draw(st.integers(1, len(session.tokens)))
        session.rewind(len(session.tokens) - num_rows)
        if reuse:
            session.reuse_prefix(num_rows)
        assert session.cached <= len(session.tokens) - num_rows
        num_tokens = data.draw(st.integers(1, len(session.tokens) - session.cached))
        self._remember()
        others = [other for other in self.alive if other is not session and other.blocks]
        while True:
            before = (session.cached, list(session.blocks), self.memory.pool.num_free)
            try:
                self.memory.compute(session, num_tokens)
                return
            except PoolExhausted:
                assert (session.cached, session.blocks, self.memory.pool.num_free) == before
                if not others:
                    return  # too large for the pool alone
                others.pop().release()

    @rule(session=sessions)
    def evict(self, session: Session) -> None:
        tokens = list(session.tokens)
        session.release()
        assert (session.cached, session.blocks, session.tokens) == (0, [], tokens)

    @rule(session=consumes(sessions))
    def end(self, session: Session) -> None:
        session.release()
        self.alive = [other for other in self.alive if other is not session]

    def _remember(self) -> None:
        for session in self.alive:
            for index, prefix_hash in enumerate(prefix_hashes(session.tokens, block_size=SIZE)):
                self.texts[prefix_hash] = session.tokens[: (index + 1) * SIZE]

    @invariant()
    def the_cache_holds_what_the_tokens_say(self) -> None:
        for session in self.alive:
            self.memory.check(session)
            assert 0 <= session.cached <= len(session.tokens)
            assert len(session.blocks) == -(-session.cached // SIZE)
            assert session.committed <= len(session.tokens)

    @invariant()
    def references_add_up(self) -> None:
        pool = self.memory.pool
        holders = Counter(block for session in self.alive for block in session.blocks)
        assert [pool.references(block) for block in range(pool.num_blocks)] == [
            holders[block] for block in range(pool.num_blocks)
        ]
        assert pool.num_held == len(holders)
        assert pool.num_free == pool.num_blocks - len(holders)

    @invariant()
    def published_blocks_hold_what_their_hash_says(self) -> None:
        self._remember()
        for prefix_hash, block in self.memory.pool._block_by_hash.items():
            assert self.memory.cells[block].tolist() == marks(self.texts[prefix_hash])[-SIZE:]
            assert self.memory.pool._hash_by_block[block] == prefix_hash

    def teardown(self) -> None:
        for session in self.alive:
            session.release()
        pool = self.memory.pool
        assert pool.num_held == 0
        assert {pool.allocate() for _ in range(pool.num_blocks)} == set(range(pool.num_blocks))


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
