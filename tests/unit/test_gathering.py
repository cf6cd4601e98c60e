"""Waiting for the texts that shared the last step: as long as it pays, and no longer."""

from __future__ import annotations

import pytest

from tandem.engine.gathering import Gathering


def after_a_step(num_answered: int, *, seconds: float = 0.02) -> Gathering:
    gathering = Gathering()
    gathering.step_ended(100.0, seconds=seconds, num_answered=num_answered)
    return gathering


def test_it_waits_until_all_are_back() -> None:
    gathering = after_a_step(3)
    for _ in range(2):
        gathering.arrived()
        assert gathering.remaining_seconds(100.001) == pytest.approx(0.004)
    gathering.arrived()
    assert gathering.remaining_seconds(100.001) == 0.0


def test_it_waits_a_quarter_of_a_step_at_most_and_never_10_ms() -> None:
    assert after_a_step(3).remaining_seconds(100.006) == 0.0
    assert after_a_step(3, seconds=5.0).remaining_seconds(100.0) == pytest.approx(0.010)


def test_a_lone_text_never_waits_once_it_is_there() -> None:
    gathering = after_a_step(1)
    gathering.arrived()
    assert gathering.remaining_seconds(100.0) == 0.0


def test_texts_that_have_ended_are_not_waited_for() -> None:
    gathering = after_a_step(2)
    gathering.arrived()
    gathering.left()
    assert gathering.remaining_seconds(100.0) == 0.0


def test_where_nobody_comes_back_it_stops_waiting_for_a_while() -> None:
    gathering = after_a_step(4)
    gathering.arrived()  # one of four
    waits = []
    for _ in range(40):
        gathering.step_ended(100.0, seconds=0.02, num_answered=4)
        gathering.arrived()
        waits.append(gathering.remaining_seconds(100.0) > 0.0)
    assert 1 <= sum(waits) <= 4  # it tries again now and then


def test_before_the_first_step_it_does_not_wait() -> None:
    assert Gathering().remaining_seconds(0.0) == 0.0
