"""`uniform`: one function of (seed, position, purpose), uniform and independent in all three.

Every statistical test below uses fixed numbers, so it passes or fails for good; its threshold is where a sound
generator would fail with probability 1e-6 at most.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from tandem.randomness import MAX_SEED, Purpose, uniform

FALSE_ALARM = 1e-6
NUM = 40_000


def numbers(
    *, seed: int = 0, position: int = 0, purpose: Purpose = Purpose.TARGET, over: str
) -> npt.NDArray[np.float64]:
    """NUM numbers, over consecutive positions or seeds."""
    if over == "position":
        return np.array([uniform(seed, position + i, purpose) for i in range(NUM)])
    return np.array([uniform(seed + i, position, purpose) for i in range(NUM)])


@pytest.mark.parametrize(
    ("seed", "position", "purpose", "number"),
    [
        (0, 0, Purpose.TARGET, 0.9133047126360325),
        (0, 0, Purpose.ACCEPT, 0.3430370964805115),
        (0, 0, Purpose.DRAFT, 0.18137290805835782),
        (1, 0, Purpose.TARGET, 0.8462814421536723),
        (0, 1, Purpose.TARGET, 0.17335632299324433),
        (1234, 4096, Purpose.DRAFT, 0.8912398164117954),
        (MAX_SEED, 2**31, Purpose.ACCEPT, 0.23392614119064026),
    ],
)
def test_known_values_never_change(seed: int, position: int, purpose: Purpose, number: float) -> None:
    """A request with a seed must say the same after an upgrade. These were computed once
    and are frozen; by hand, with b = blake2b(seed and position, 8 bytes each, person=purpose): (b >> 11) / 2^53.
    """
    assert uniform(seed, position, purpose) == number


def test_a_number_is_the_same_at_every_call_whatever_was_asked_between() -> None:
    first = [uniform(7, position, Purpose.DRAFT) for position in range(50)]
    again = [uniform(7, position, Purpose.DRAFT) for position in reversed(range(50))]
    assert first == again[::-1]


def test_numbers_have_53_bits_and_lie_in_the_half_open_interval() -> None:
    drawn = numbers(over="position")
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    scaled = drawn * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert (scaled % 2 == 1).any()


@pytest.mark.parametrize("over", ["position", "seed"])
@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_are_uniform(purpose: Purpose, over: str) -> None:
    """Kolmogorov-Smirnov over 40,000 numbers, p > 1e-6: sees a distribution function off by 0.025 somewhere."""
    assert stats.kstest(numbers(seed=11, position=5, purpose=purpose, over=over), "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("over", ["position", "seed"])
def test_low_bits_are_as_uniform_as_high_ones(over: str) -> None:
    """Each of the 53 bits of 40,000 numbers is set in half of them, within 5.6 standard deviations (1e-6 / 53)."""
    mantissas = (numbers(seed=3, over=over) * 2.0**53).astype(np.uint64)
    share = np.array([((mantissas >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(53)])
    assert np.abs(share - 0.5).max() < 5.6 * 0.5 / math.sqrt(NUM)


STREAMS = {
    f"{purpose.name} of seed {seed} from position {position}": (seed, position, purpose)
    for purpose, (seed, position) in itertools.product(Purpose, ((0, 0), (0, 1), (1, 0), (2**32, 0), (0, 2**20)))
}


def test_purposes_seeds_and_neighbouring_positions_are_uncorrelated() -> None:
    """All 105 pairs of 15 streams of 40,000 numbers: |r| < 5.9 / sqrt(40,000) = 0.0295 (1e-6 over all pairs, or less).

    A pair with a correlation of 0.05 would be caught with probability above 0.9999.
    """
    streams = np.stack(
        [
            numbers(seed=seed, position=position, purpose=purpose, over="position")
            for seed, position, purpose in STREAMS.values()
        ]
    )
    correlation = np.corrcoef(streams)
    assert np.abs(correlation - np.eye(len(streams))).max() < 5.9 / math.sqrt(NUM)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 0, Purpose.ACCEPT), (0, 0, Purpose.DRAFT)),
        ((0, 0, Purpose.ACCEPT), (0, 0, Purpose.TARGET)),
        ((0, 0, Purpose.DRAFT), (0, 0, Purpose.TARGET)),
        ((0, 0, Purpose.DRAFT), (0, 1, Purpose.DRAFT)),
        ((0, 0, Purpose.TARGET), (0, 1, Purpose.TARGET)),
    ],
)
def test_what_one_round_uses_is_jointly_uniform(
    first: tuple[int, int, Purpose], second: tuple[int, int, Purpose]
) -> None:
    """Chi-square of 40,000 pairs over 10 x 10 cells, one pair a seed, p > 1e-6: any dependence between the numbers of
    one round, not only a linear one. Sees a total-variation error of 0.033."""
    counts = np.zeros((10, 10))
    for seed in range(NUM):
        row, column = (int(10 * uniform(seed + s, position, purpose)) for s, position, purpose in (first, second))
        counts[row, column] += 1
    assert stats.chisquare(counts.reshape(-1)).pvalue > FALSE_ALARM


def test_seed_and_position_do_not_trade_places() -> None:
    assert uniform(1, 2, Purpose.DRAFT) != uniform(2, 1, Purpose.DRAFT)
    distinct = {uniform(seed, position, purpose) for seed in range(20) for position in range(20) for purpose in Purpose}
    assert len(distinct) == 20 * 20 * len(Purpose)
