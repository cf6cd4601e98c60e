"""Waiting for the texts that shared the last step: as long as it pays, and no longer."""

from __future__ import annotations

import pytest

from tandem.engine.gathering import Gathering


def after_a_step(texts: str, *, seconds: float = 0.02) -> Gathering:
    gathering = Gathering()
    gathering.step_ended(100.0, seconds=seconds, answered=texts)
    return gathering


def test_it_waits_until_all_are_back() -> None:
    gathering = after_a_step("abc")
    for text in "ac":
        gathering.arrived(text)
        assert gathering.remaining_seconds(100.001) == pytest.approx(0.009)
    gathering.arrived("b")
    assert gathering.remaining_seconds(100.001) == 0.0


def test_it_waits_half_a_step_at_most_and_never_10_ms() -> None:
    assert after_a_step("abc").remaining_seconds(100.011) == 0.0
    assert after_a_step("abc", seconds=5.0).remaining_seconds(100.0) == pytest.approx(0.010)


def test_texts_that_were_parted_come_together_again() -> None:
    """c and d asked while a and b were computed: they wait for these two."""
    gathering = after_a_step("ab")
    for text in "cda":
        gathering.arrived(text)
        assert gathering.remaining_seconds(100.0) > 0.0
    gathering.arrived("b")
    assert gathering.remaining_seconds(100.0) == 0.0


def test_a_lone_text_never_waits_once_it_is_there() -> None:
    gathering = after_a_step("a")
    gathering.arrived("a")
    assert gathering.remaining_seconds(100.0) == 0.0


def test_texts_that_have_ended_are_not_waited_for() -> None:
    gathering = after_a_step("ab")
    gathering.arrived("a")
    gathering.left("b")
    assert gathering.remaining_seconds(100.0) == 0.0
    gathering.left("of another step")
    gathering.step_ended(100.0, seconds=0.02, answered="a")  # and nobody is blamed for it
    assert gathering.remaining_seconds(100.0) > 0.0


@pytest.mark.parametrize("texts", ["a", "abcd"])
def test_where_nobody_comes_back_it_stops_waiting_for_a_while(texts: str) -> None:
    gathering = after_a_step(texts)
    waits = []
    for _ in range(40):
        gathering.arrived("a" if len(texts) > 1 else "another")  # one of four, or none
        gathering.step_ended(100.0, seconds=0.02, answered=texts)
        waits.append(gathering.remaining_seconds(100.0) > 0.0)
    assert 1 <= sum(waits) <= 4  # it tries again now and then


def test_before_the_first_step_it_does_not_wait() -> None:
    assert Gathering().remaining_seconds(0.0) == 0.0
