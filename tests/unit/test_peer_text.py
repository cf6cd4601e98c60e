"""PeerText, with the engine's own Session as the peer: whatever is accepted or rejected, the two hold the same text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.peer_text import Change, PeerText
from tandem.engine.block_pool import BlockPool
from tandem.engine.session import Session

SEEDED = settings(max_examples=300, deadline=None, derandomize=True, database=None)
TOKENS = st.lists(st.integers(0, 1), max_size=5)


def test_guesses_that_stand_are_not_sent_again() -> None:
    text = PeerText(10)
    text.guess((7, 8, 9))
    assert text.change_to([*range(10), 7, 8, 4]) == Change(12, (4,))


def test_guesses_that_all_stand_leave_only_the_bonus_token() -> None:
    text = PeerText(2)
    text.guess((7, 8))
    assert text.change_to([0, 1, 7, 8, 5]) == Change(4, (5,))


def test_a_recovered_token_replaces_the_first_guess() -> None:
    text = PeerText(2)
    text.guess((7, 8))
    assert text.change_to([0, 1, 6]) == Change(2, (6,))


def test_without_guesses_new_tokens_are_appended() -> None:
    text = PeerText(2)
    assert text.change_to([0, 1, 2]) == Change(2, (2,))
    assert text.change_to([0, 1, 2, 3, 4]) == Change(3, (3, 4))
    assert text.change_to([0, 1, 2, 3, 4]) == Change(5, ())


def test_a_text_that_stops_within_the_guesses_drops_the_rest() -> None:
    text = PeerText(1)
    text.guess((7, 8, 9))
    assert text.change_to([0, 7]) == Change(2, ())
    assert text.change_to([0, 7, 8]) == Change(2, (8,))


def test_guesses_are_forgotten_with_the_next_change() -> None:
    text = PeerText(1)
    text.guess((7, 8))
    text.change_to([0, 5])
    assert text.change_to([0, 5, 7, 8]) == Change(2, (7, 8))


@SEEDED
@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5),
    rounds=st.lists(st.tuples(TOKENS, st.integers(0, 5), TOKENS, st.booleans()), max_size=12),
)
def test_the_peers_tokens_are_the_text_after_any_accepts_and_rejects(
    prompt: list[int], rounds: list[tuple[list[int], int, list[int], bool]]
) -> None:
    """Each round: guesses, how many of them stand, what the text goes on with, whether a guess was set aside unheld.

    Two token ids make what follows a rejection often equal to the guess that was rejected.
    """
    session = Session(BlockPool(num_blocks=1, block_size=4), prompt)
    peer = PeerText(len(prompt))
    text = list(prompt)
    for guesses, stand, more, set_aside in rounds:
        change = peer.change_to(text)
        session.advance(change.keep_length, change.new_tokens)
        assert session.tokens == text
        if not set_aside:
            session.guess(guesses)
            peer.guess(guesses)
        text += [*guesses[:stand], *more]
    change = peer.change_to(text)
    session.advance(change.keep_length, change.new_tokens)
    assert session.tokens == text


@SEEDED
@given(guesses=TOKENS, tail=TOKENS)
def test_a_change_sends_nothing_that_the_peer_already_guessed(guesses: list[int], tail: list[int]) -> None:
    peer = PeerText(1)
    peer.guess(guesses)
    change = peer.change_to([0, *tail])
    stand = change.keep_length - 1
    assert guesses[:stand] == tail[:stand]
    assert list(change.new_tokens) == tail[stand:]
    assert stand == min(len(guesses), len(tail)) or guesses[stand] != tail[stand]
