"""Stop strings against a plain search of the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopMatcher

TEXT = st.text(alphabet="ab<>", max_size=40)
STOPS = st.lists(st.text(alphabet="ab<>", min_size=1, max_size=5), max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(borders)]


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What each piece releases, last the flush; and the stop string that matched."""
    matcher = StopMatcher(stops, include_stop=include)
    released: list[str] = []
    for piece in pieces:
        released.append(matcher.feed(piece))
        if matcher.matched is not None:
            return released, matcher.matched
    return [*released, matcher.flush()], None


def reference(stops: list[str], text: str, *, include: bool) -> str:
    """The text up to the stop that ends first; of those that end there, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))]
    return text


@given(STOPS, TEXT, st.lists(st.integers(0, 40)), st.booleans())
def test_d2_any_cut_into_pieces_gives_the_text_of_the_whole(
    stops: list[str], text: str, cuts: list[int], include: bool
) -> None:
    released, _ = run(stops, pieces_of(text, cuts), include=include)
    assert "".join(released) == reference(stops, text, include=include)


@given(STOPS, TEXT)
def test_d11_only_what_can_begin_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops, include_stop=False)
    released = ""
    for index, char in enumerate(text):
        released += matcher.feed(char)
        if matcher.matched is not None:
            return
        held = text[len(released) : index + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_d1_a_stop_string_over_several_pieces_is_never_seen() -> None:
    released, matched = run(["<|user|>"], ["Hello", " <", "|us", "er|", "> more"])
    assert released == ["Hello", " ", "", "", ""]
    assert matched == "<|user|>"


def test_d1_held_text_is_released_as_soon_as_the_match_fails() -> None:
    released, matched = run(["</s>"], ["a<", "/", "b", "c"])
    assert released == ["a", "", "</b", "c", ""]
    assert matched is None


def test_held_text_is_released_at_the_end() -> None:
    assert run(["stop"], ["a st"]) == (["a ", "st"], None)


def test_the_stop_string_stays_where_it_is_asked_for() -> None:
    assert run(["END"], ["abc E", "ND def"], include=True) == (["abc ", "END"], "END")


def test_the_first_stop_to_complete_wins_and_of_two_at_once_the_longer() -> None:
    assert run(["bcd", "b"], ["abcd"]) == (["a"], "b")
    assert run(["b", "ab"], ["xab"]) == (["x"], "ab")


def test_a_stop_string_may_overlap_itself() -> None:
    assert run(["aab"], ["aaab"]) == (["a"], "aab")


def test_while_not_armed_a_stop_string_is_text() -> None:
    matcher = StopMatcher(["ab"], include_stop=False)
    assert matcher.feed("xab", armed=False) == "xab"
    assert matcher.feed("a", armed=False) == ""
    assert matcher.feed("b!", armed=True) == ""
    assert matcher.matched == "ab"


def test_without_stop_strings_nothing_is_held() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_d10_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""], include_stop=False)
