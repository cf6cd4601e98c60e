"""The table of a forward's time by tokens: from a few measurements, kept current."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tandem.engine.step_times import StepTimes, measure, measure_change


def test_between_measured_sizes_lies_a_straight_line_and_beyond_them_the_last_slope() -> None:
    times = StepTimes([(1, 0.010), (5, 0.014), (9, 0.022)])
    assert times.seconds(1) == pytest.approx(0.010)
    assert times.seconds(4) == pytest.approx(0.013)
    assert times.seconds(8) == pytest.approx(0.020)
    assert times.seconds(128) == pytest.approx(0.022 + 0.002 * (128 - 9))


def test_one_measurement_is_a_constant() -> None:
    assert StepTimes([(1, 0.010)]).seconds(20) == pytest.approx(0.010)


def test_it_follows_the_load() -> None:
    times = StepTimes([(1, 0.010), (8, 0.020)])
    for _ in range(100):
        times.observe(1, 0.015)
    assert times.seconds(1) == pytest.approx(0.015, rel=0.01)
    assert times.seconds(8) == pytest.approx(0.030, rel=0.01)  # the shape stays
    for _ in range(300):
        times.observe(1, 0.015)
        times.observe(8, 0.060)
    assert times.seconds(8) == pytest.approx(0.060, rel=0.15)
    assert times.seconds(1) == pytest.approx(0.015, rel=0.15)


def test_a_single_slow_forward_moves_it_by_a_tenth_at_most() -> None:
    times = StepTimes([(1, 0.010), (8, 0.020)])
    times.observe(1, 5.0)
    assert times.seconds(1) <= 0.0111


def test_more_tokens_never_seem_to_take_less_than_one() -> None:
    times = StepTimes([(1, 0.010), (8, 0.005)])
    for _ in range(50):
        times.observe(8, 0.001)
    assert times.seconds(8) >= times.seconds(1)


@pytest.mark.parametrize("measured", [[], [(2, 0.01)], [(1, 0.0)], [(1, 0.01), (2, -1.0)]])
def test_measurements_that_make_no_sense_are_refused(measured: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="first measurement"):
        StepTimes(measured)


def test_measuring_runs_every_size_that_fits() -> None:
    sizes: list[int] = []
    pairs = measure(sizes.append, most_tokens=20)
    assert [size for size, _ in pairs] == [1, 2, 4, 8, 16]
    assert set(sizes) == {1, 2, 4, 8, 16}
    assert all(seconds >= 0.0 for _, seconds in pairs)


def test_a_hiccup_while_measuring_does_not_count() -> None:
    """Longer than all times of a size would take one after another: what else starts on the machine takes its turn."""
    calls = 0

    def run(_num_tokens: int) -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.03 if 10 <= calls < 18 else 0.002)

    assert max(seconds for _, seconds in measure(run, most_tokens=64)) < 0.02


def test_a_size_that_takes_several_runs_to_come_to_speed_is_waited_for() -> None:
    """Though the first runs alone have taken longer than the measuring should: they say nothing of those to come."""
    runs: Counter[int] = Counter()

    def run(num_tokens: int) -> None:
        runs[num_tokens] += 1
        slow = runs[num_tokens] == 1 or (num_tokens == 32 and runs[num_tokens] == 2)
        time.sleep(0.06 if slow else 0.002)

    assert dict(measure(run, most_tokens=64))[32] < 0.02


def test_of_slow_models_two_sizes_are_measured_twice() -> None:
    sizes: list[int] = []

    def run(num_tokens: int) -> None:
        sizes.append(num_tokens)
        time.sleep(0.11)

    assert [size for size, _ in measure(run, most_tokens=64)] == [1, 8]
    assert sizes == [1, 1, 1, 8, 1, 8]


def test_what_a_change_of_size_costs_is_measured() -> None:
    """By a run that sleeps where the size is another one than before, as OpenVINO prepares its operations."""
    last = 0

    def run(num_tokens: int) -> None:
        nonlocal last
        time.sleep(0.012 if num_tokens != last else 0.002)
        last = num_tokens

    assert measure_change(run, most_tokens=64) == pytest.approx(0.010, rel=0.5)
    assert measure_change(lambda _: None, most_tokens=64) < 0.001
    assert measure_change(run, most_tokens=8) == 0.0  # a context so short has no drafts of such lengths
