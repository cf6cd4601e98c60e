"""The statistics of `tandem verify`: against scipy, against simulation, and against broken promises."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from tandem.verification.statistics import (
    Outcome,
    chi_square_tail,
    compare,
    holm,
    noncentral_tail,
    pooled_cells,
    smallest_visible_deviation,
)


def sample(rng: np.random.Generator, probs: np.ndarray[tuple[int], np.dtype[np.float64]], size: int) -> list[Outcome]:
    """Outcomes (i,) of a law."""
    return [(int(i),) for i in rng.choice(len(probs), size=size, p=probs)]


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 10, 63, 200, 1001])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 1.5, 3.0, 20.0])
def test_the_tail_of_chi_square_is_scipy_s(degrees: int, ratio: float) -> None:
    x = ratio * degrees
    assert chi_square_tail(x, degrees) == pytest.approx(stats.chi2.sf(x, degrees), rel=1e-9, abs=1e-300)


def test_the_tail_of_chi_square_begins_at_one() -> None:
    assert chi_square_tail(0.0, 1) == chi_square_tail(0.0, 8) == 1.0


@pytest.mark.parametrize("degrees", [1, 3, 30])
@pytest.mark.parametrize("noncentrality", [0.0, 0.1, 5.0, 60.0, 900.0])
def test_the_noncentral_tail_is_scipy_s(degrees: int, noncentrality: float) -> None:
    for x in (1.0, 30.0, 90.0, 900.0):
        expected = stats.ncx2.sf(x, degrees, noncentrality) if noncentrality else stats.chi2.sf(x, degrees)
        assert noncentral_tail(x, degrees, noncentrality) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_the_statistic_is_pearson_s() -> None:
    first = [(0,)] * 30 + [(1,)] * 20 + [(2,)] * 50
    second = [(0,)] * 20 + [(1,)] * 35 + [(2,)] * 45
    table = stats.chi2_contingency([[30, 20, 50], [20, 35, 45]])
    comparison = compare(first, second)
    assert comparison.statistic == pytest.approx(table.statistic)
    assert comparison.p_value == pytest.approx(table.pvalue)
    assert (comparison.num_cells, comparison.degrees, comparison.num_samples) == (3, 2, 100)
    assert comparison.distance == pytest.approx(0.15)


def test_samples_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="one size, got 2 and 1"):
        compare([(0,), (1,)], [(0,)])


def test_one_outcome_alone_is_no_evidence() -> None:
    comparison = compare([(7,)] * 50, [(7,)] * 50)
    assert (comparison.degrees, comparison.p_value, comparison.distance) == (0, 1.0, 0.0)


def test_rare_outcomes_are_pooled_with_their_beginning_first() -> None:
    counts: Counter[Outcome] = Counter({(1, 1): 30, (1, 2): 4, (1, 3): 7, (2, 1): 3, (3, 3): 2, (4, 4): 9})
    cells = pooled_cells(counts, min_count=10)
    assert cells == {(1, 1): (1, 1), (1, 2): (1,), (1, 3): (1,), (2, 1): (), (3, 3): (), (4, 4): ()}


def test_a_rest_that_is_too_small_joins_the_smallest_cell() -> None:
    cells = pooled_cells(Counter({(1,): 30, (2,): 12, (3,): 4}), min_count=10)
    assert cells == {(1,): (1,), (2,): (2,), (3,): (2,)}


def test_no_cell_is_below_the_minimum_however_the_counts_lie() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        outcomes = [tuple(int(part) for part in row) for row in rng.zipf(1.6, size=(60, 3)) % 9]
        counts = Counter(outcomes)
        cells = pooled_cells(counts, min_count=10)
        sizes: Counter[Outcome] = Counter()
        for outcome, cell in cells.items():
            sizes[cell] += counts[outcome]
        assert min(sizes.values()) >= 10


@pytest.mark.parametrize("size", [40, 400])
@pytest.mark.parametrize("num_outcomes", [2, 10, 80])
def test_equal_laws_fail_no_oftener_than_promised(num_outcomes: int, size: int) -> None:
    """1,000 comparisons at levels 0.1 and 0.01: the counts may exceed the promise by three standard deviations."""
    rng = np.random.default_rng(num_outcomes * size)
    probs = 1.0 / np.arange(1, num_outcomes + 1)
    probs /= probs.sum()
    p_values = np.array([compare(sample(rng, probs, size), sample(rng, probs, size)).p_value for _ in range(1000)])
    for level in (0.1, 0.01):
        assert (p_values < level).sum() <= 1000 * level + 3.0 * np.sqrt(1000 * level)


@pytest.mark.parametrize(("num_outcomes", "size"), [(2, 300), (4, 500), (16, 800)])
def test_the_stated_deviation_is_found_with_the_stated_power(num_outcomes: int, size: int) -> None:
    """The hardest deviation: every cell off by the same ratio, half up, half down. 150 trials, 3 sigma of room."""
    rng = np.random.default_rng(17)
    false_alarm, power = 1e-6, 0.9
    visible = smallest_visible_deviation(
        num_samples=size, degrees=num_outcomes - 1, false_alarm=false_alarm, power=power
    )
    even = np.full(num_outcomes, 1.0 / num_outcomes)
    signs = np.where(np.arange(num_outcomes) % 2, 1.0, -1.0)
    ours, theirs = even * (1.0 + visible * signs), even * (1.0 - visible * signs)
    assert 0.5 * np.abs(ours - theirs).sum() == pytest.approx(visible)
    found = sum(compare(sample(rng, ours, size), sample(rng, theirs, size)).p_value < false_alarm for _ in range(150))
    assert found / 150 >= power - 3.0 * np.sqrt(power * (1.0 - power) / 150)


def test_more_samples_see_more_and_more_outcomes_see_less() -> None:
    def visible(num_samples: int, degrees: int) -> float:
        return smallest_visible_deviation(num_samples=num_samples, degrees=degrees, false_alarm=1e-6, power=0.95)

    assert visible(400, 3) == pytest.approx(2.0 * visible(1600, 3), rel=1e-4)
    assert visible(400, 3) < visible(400, 30) < visible(400, 300)
    assert visible(5, 300) == 1.0


def test_holm_s_adjusted_p_values_in_the_order_given() -> None:
    """Worked by hand: 0.01 x 4, 0.013 x 3 raised to the one before, 0.03 x 2, 0.9 x 1."""
    assert holm([0.03, 0.01, 0.9, 0.013]) == pytest.approx([0.06, 0.04, 0.9, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
