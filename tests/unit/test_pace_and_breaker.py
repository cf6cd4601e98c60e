"""When an answer is late, and when a service that failed is tried again."""

from __future__ import annotations

import pytest

from gateway.breaker import Breaker
from gateway.pace import Pace


def test_while_nothing_is_known_an_answer_is_late_after_the_longest_wait() -> None:
    assert Pace().late_after(30.0) == 30.0


def test_an_answer_is_late_after_many_times_what_is_usual() -> None:
    pace = Pace()
    for _ in range(100):
        pace.observe(1.0)
    assert pace.mean_seconds == pytest.approx(1.0)
    assert pace.late_after(30.0) == pytest.approx(8.0, abs=0.1)  # the deviation has faded


def test_answers_that_vary_are_given_more_time_than_steady_ones_of_the_same_mean() -> None:
    steady, varying = Pace(), Pace()
    for number in range(100):
        steady.observe(1.0)
        varying.observe(0.2 if number % 2 else 1.8)
    assert varying.late_after(60.0) > 1.5 * steady.late_after(60.0)


def test_no_answer_is_late_before_a_tenth_of_the_longest_wait_nor_later_than_that() -> None:
    pace = Pace()
    pace.observe(0.001)
    assert pace.late_after(30.0) == 3.0
    pace.observe(1000.0)
    assert pace.late_after(30.0) == 30.0


def test_an_answer_of_many_units_may_take_as_much_longer() -> None:
    pace = Pace()
    pace.observe(10.0, units=100)
    assert pace.mean_seconds == pytest.approx(0.1)
    assert pace.late_after(1000.0, units=1000) == pytest.approx(10 * pace.late_after(1000.0, units=100), rel=0.3)


def test_a_breaker_is_closed_until_a_fault_and_then_rests() -> None:
    breaker = Breaker(longest_seconds=3.0)
    assert breaker.allows(0.0)
    breaker.fault(10.0)
    assert not breaker.allows(10.4)
    assert breaker.allows(10.5)


def test_after_the_rest_one_may_try_and_the_others_when_it_succeeded() -> None:
    breaker = Breaker(longest_seconds=3.0)
    breaker.fault(10.0)
    breaker.begin(10.5)
    assert not breaker.allows(10.6)
    breaker.success()
    assert breaker.allows(10.6)


def test_each_failed_try_doubles_the_rest_up_to_the_longest() -> None:
    breaker = Breaker(longest_seconds=3.0)
    now, rests = 0.0, []
    breaker.fault(now)
    for _ in range(5):
        begin = now
        while not breaker.allows(now):
            now += 0.25
        rests.append(now - begin)
        breaker.begin(now)
        breaker.fault(now)
    assert rests == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_many_who_lose_the_same_service_are_one_fault() -> None:
    breaker = Breaker(longest_seconds=3.0)
    for _ in range(100):
        breaker.fault(10.0)
    assert breaker.allows(10.5)


def test_a_try_whose_end_nobody_tells_of_blocks_no_longer_than_the_rest() -> None:
    breaker = Breaker(longest_seconds=3.0)
    breaker.fault(10.0)
    breaker.begin(10.5)  # the client leaves
    assert not breaker.allows(10.9)
    assert breaker.allows(11.0)


def test_news_of_the_service_allow_a_try_at_once() -> None:
    breaker = Breaker(longest_seconds=3.0)
    breaker.fault(10.0)
    breaker.retry_at_once()
    assert breaker.allows(10.0)
    breaker.begin(10.0)
    assert not breaker.allows(10.1)


def test_a_fault_long_after_a_success_begins_again_with_the_shortest_rest() -> None:
    breaker = Breaker(longest_seconds=3.0)
    breaker.fault(0.0)
    breaker.begin(0.5)
    breaker.success()
    breaker.fault(100.0)
    assert breaker.allows(100.5)
