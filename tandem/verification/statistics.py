"""Do two samples come from one law, and how small a difference would have been seen? Pure, standard library alone.

The test is Pearson's chi-square of two samples of equal size n. With a and b the counts of one cell,

    statistic = sum over cells of (a - b)^2 / (a + b),   cells - 1 degrees of freedom.

Why this one: its power has a closed form, which a permutation test's has not, and a p-value of 1e-7 costs no ten
million shuffles. Why its tail can be trusted that far out: given a + b, under equal laws a - b is a sum of a + b fair
signs, whose even moments are at most the normal law's (Khinchine), so that the statistic's tail is no heavier than
chi-square's. The sizes must be equal for that. Cells are chosen by looking at a + b alone, which says nothing of a - b,
so choosing costs nothing.

The smallest visible deviation: with p and q the laws of the cells and m their mean, the noncentrality is
n / 2 * sum (p - q)^2 / m, at least n / 2 * (sum |p - q|)^2 (Cauchy-Schwarz), that is 2 n TV^2 with TV the total
variation distance. So a distance TV is found with at least the power that belongs to 2 n TV^2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Outcome = tuple[int, ...]

MIN_EXPECTED = 5.0  # in each sample and cell: Cochran's rule


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two samples of `num_samples` each, compared in `num_cells` cells; `distance` is theirs, noise included."""

    num_samples: int
    num_cells: int
    statistic: float
    p_value: float
    distance: float  # total variation, 0 to 1

    @property
    def degrees(self) -> int:
        return self.num_cells - 1


def compare(first: Sequence[Outcome], second: Sequence[Outcome]) -> Comparison:
    """Test whether two samples of one size, outcomes of one length, come from one law. One cell: p-value 1."""
    if len(first) != len(second) or not first:
        raise ValueError(f"need two samples of one size, got {len(first)} and {len(second)}")
    counts = Counter(first), Counter(second)
    cell_of = pooled_cells(counts[0] + counts[1], min_count=2.0 * MIN_EXPECTED)
    cells: list[Counter[Outcome]] = []
    for count in counts:
        cells.append(Counter())
        for outcome, number in count.items():
            cells[-1][cell_of[outcome]] += number
    ours, theirs = cells
    names = ours.keys() | theirs.keys()
    statistic = sum((ours[name] - theirs[name]) ** 2 / (ours[name] + theirs[name]) for name in names)
    distance = sum(abs(ours[name] - theirs[name]) for name in names) / (2.0 * len(first))
    p_value = chi_square_tail(statistic, len(names) - 1) if len(names) > 1 else 1.0
    return Comparison(len(first), len(names), statistic, p_value, distance)


def pooled_cells(counts: Counter[Outcome], *, min_count: float) -> dict[Outcome, Outcome]:
    """Each outcome's cell: the outcome itself where it is frequent, else what it shares a beginning with.

    Rare outcomes (a, b, c) are pooled with others that begin with (a, b), if that is too few, with those that begin
    with (a,), then with all. A last rest that is too few by itself joins the smallest cell.
    """
    cell_of = {outcome: outcome for outcome in counts}
    longest = max(map(len, counts))
    for length in range(longest - 1, -1, -1):
        sizes: Counter[Outcome] = Counter()
        for outcome, cell in cell_of.items():
            sizes[cell] += counts[outcome]
        for outcome, cell in cell_of.items():
            if len(cell) == length + 1 and sizes[cell] < min_count:
                cell_of[outcome] = outcome[:length]
    sizes = Counter()
    for outcome, cell in cell_of.items():
        sizes[cell] += counts[outcome]
    if 0 < sizes[()] < min_count and len(sizes) > 1:
        smallest = min((cell for cell in sizes if cell), key=lambda cell: (sizes[cell], cell))
        cell_of = {outcome: cell or smallest for outcome, cell in cell_of.items()}
    return cell_of


def chi_square_tail(x: float, degrees: int) -> float:
    """P(X >= x) for X chi-square with `degrees` >= 1, by the finite sums of Abramowitz and Stegun 26.4.4 and 26.4.5."""
    if x <= 0.0:
        return 1.0
    half = 0.5 * x
    first = 0.5 if degrees % 2 else 0.0
    total = math.erfc(math.sqrt(half)) if degrees % 2 else 0.0
    for i in range(degrees // 2):
        power = first + i
        # In logarithms: half ** power alone overflows from some hundred degrees on.
        total += math.exp(power * math.log(half) - half - math.lgamma(power + 1.0))
    return min(1.0, total)


def noncentral_tail(x: float, degrees: int, noncentrality: float) -> float:
    """P(X >= x) for X noncentral chi-square: a Poisson mixture of central ones, from the middle outwards."""
    mean = 0.5 * noncentrality
    if mean == 0.0:
        return chi_square_tail(x, degrees)
    middle, spread = int(mean), int(10.0 * math.sqrt(mean)) + 30  # what lies outside is below 1e-15
    return min(
        1.0,
        sum(
            math.exp(j * math.log(mean) - mean - math.lgamma(j + 1.0)) * chi_square_tail(x, degrees + 2 * j)
            for j in range(max(0, middle - spread), middle + spread)
        ),
    )


def smallest_visible_deviation(*, num_samples: int, degrees: int, false_alarm: float, power: float) -> float:
    """The total variation distance that `compare` finds with at least this power, wherever it lies; at most 1."""
    critical = _root(lambda x: false_alarm - chi_square_tail(x, degrees), high=degrees + 100.0)
    noncentrality = _root(lambda x: noncentral_tail(critical, degrees, x) - power, high=critical + 100.0)
    return min(1.0, math.sqrt(noncentrality / (2.0 * num_samples)))


def holm(p_values: Iterable[float]) -> list[float]:
    """Adjusted p-values, in the order given: those below a are rejected with family-wise false-alarm rate a.

    Holm 1979; holds whatever the dependence between the tests.
    """
    values = list(p_values)
    adjusted = [0.0] * len(values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = least
    return adjusted


def _root(rising: Callable[[float], float], *, high: float) -> float:
    """Where a rising function that is negative at 0 crosses zero, to six digits. Bisection."""
    low = 0.0
    while rising(high) < 0.0:
        low, high = high, 2.0 * high
    while high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        if rising(middle) < 0.0:
            low = middle
        else:
            high = middle
    return high
