"""The suffix automaton against a search that has no index, and how much work it does."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tandem.lookup.suffix_automaton
from tandem.lookup.suffix_automaton import Match, SuffixAutomaton

SEEDED = settings(max_examples=200, deadline=None, derandomize=True, database=None)

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))


def earlier_ends(tokens: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """Where `suffix`, the end of `tokens`, ends before."""
    size = len(suffix)
    return [end for end in range(size, len(tokens)) if tokens[end - size : end] == suffix]


def longest_repeated_suffix(tokens: Sequence[int]) -> Sequence[int]:
    """The definition: the longest one that ends at another place too."""
    sizes = range(len(tokens) - 1, 0, -1)
    return next((tokens[-size:] for size in sizes if earlier_ends(tokens, tokens[-size:])), [])


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([], Match(0, 0)),
        ([7], Match(0, 0)),
        ([1, 2, 9, 1, 2], Match(2, 2)),
        ([1, 2, 9, 1, 2, 8, 1, 2], Match(2, 5)),  # the latest of equally long ones
        ([5, 1, 2, 6, 1, 2, 8, 5, 1, 2], Match(3, 3)),  # a longer one beats a later one
        ([4, 4, 4], Match(2, 2)),  # a match may overlap the end
        ([1, 2, 3], Match(0, 0)),
    ],
)
def test_matches_by_hand(tokens: list[int], match: Match) -> None:
    found = SuffixAutomaton(tokens).match
    assert found.length == match.length
    assert found.length == 0 or found.end == match.end


@SEEDED
@given(tokens=texts)
def test_after_every_token_the_longest_repeated_suffix_and_a_place_of_it_are_known(tokens: list[int]) -> None:
    """The place: where this very match was last the longest one; where it never was, some earlier one."""
    automaton = SuffixAutomaton()
    last_longest: dict[tuple[int, ...], int] = {}
    for total in range(1, len(tokens) + 1):
        automaton.extend(tokens[total - 1 : total])
        suffix = tuple(longest_repeated_suffix(tokens[:total]))
        assert automaton.match.length == len(suffix)
        if suffix:
            assert automaton.match.end in earlier_ends(tokens[:total], list(suffix))
            assert automaton.match.end == last_longest.get(suffix, automaton.match.end)
        last_longest[suffix] = total


@SEEDED
@given(tokens=texts, share=st.floats(0, 1), more=texts)
def test_a_truncated_text_leaves_no_trace(tokens: list[int], share: float, more: list[int]) -> None:
    automaton, length = SuffixAutomaton(tokens), round(share * len(tokens))
    automaton.truncate(length)
    automaton.extend(more)
    assert automaton.tokens == tokens[:length] + more
    assert automaton.match.length == len(longest_repeated_suffix(automaton.tokens))


def test_truncating_to_more_than_there_is_changes_nothing() -> None:
    automaton = SuffixAutomaton([1, 2, 1])
    automaton.truncate(5)
    assert (automaton.tokens, automaton.match) == ([1, 2, 1], Match(1, 1))


def fibonacci(length: int) -> list[int]:
    """0, 01, 010, 01001: a word in which everything repeats at every scale."""
    one, other = [0], [0, 1]
    while len(other) < length:
        one, other = other, other + one
    return other[:length]


def lines_run(tokens: Sequence[int]) -> int:
    """Lines of the module that run while `tokens` are added: a clock that no other process can disturb."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != tandem.lookup.suffix_automaton.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        SuffixAutomaton(tokens)
    finally:
        sys.settrace(before)
    return count


CHOICE = random.Random(1)
TEXTS = {
    "one token": [7] * 4_000,
    "two tokens in turn": [1, 2] * 2_000,
    "all different": list(range(4_000)),
    "random, of two": [CHOICE.randrange(2) for _ in range(4_000)],
    "random, of a hundred": [CHOICE.randrange(100) for _ in range(4_000)],
    "the same half again": [CHOICE.randrange(1_000) for _ in range(2_000)] * 2,
    "Fibonacci": fibonacci(4_000),
    "a b ... b a b ... b": ([1] + [2] * 62) * 63,
}


@pytest.mark.parametrize("name", TEXTS)
def test_work_and_memory_grow_as_the_text_does(name: str) -> None:
    tokens = TEXTS[name]
    # At most so many lines a token, on any text; twice the text takes twice the work, not four times.
    assert lines_run(tokens) < 60 * len(tokens)
    assert lines_run(tokens) < 2.2 * lines_run(tokens[: len(tokens) // 2])
    automaton = SuffixAutomaton(tokens)
    assert len(automaton._edges) <= 2 * len(tokens)
    assert sum(map(len, automaton._edges)) <= 3 * len(tokens)
