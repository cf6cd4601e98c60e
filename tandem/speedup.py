"""What speculation gains, as formulas: pure functions, each with its source. The gateway chooses k by them, `tandem
advise` predicts with them, and docs/choosing-a-draft.md explains them.

Words and symbols: k is the number of draft tokens asked for in a round, `rate` (alpha) the probability that a drafted
token is accepted, `accepted[j - 1]` (s_j) the probability that a round brings an accepted j-th draft token, c the time
of a draft token over that of the target's forward with one token. Where acceptance is the same at every position and
independent of what came before, s_j = alpha^j; measured acceptance seldom is, so what decides takes the s_j.

Sources:

* Leviathan, Kalman, Matias 2022, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192:
  equation 1 (tokens of a round), theorem 3.8 (speed-up), corollary 3.9 (when any k pays).
* "Speculative speculative decoding" 2026, arXiv 2603.03251: the next draft is made while the target verifies, for the
  outcomes that are likely; a fraction of the rounds finds it ready.
* Liu et al. 2024, "PEARL", arXiv 2408.11850: drafting and verifying at the same time, the bound of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_TOLERANCE: Final = 1e-6  # of a break-even rate
_MOST_HALVINGS: Final = 40  # far beyond the tolerance


def geometric(rate: float, k: int) -> list[float]:
    """s_1, ..., s_k where each token is accepted with probability `rate`, whatever came before: rate^j.

    Raises ValueError for what is no probability.
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"an acceptance rate is from 0 to 1, got {rate}")
    return list(accumulate([rate] * k, lambda reached, step: reached * step))


def expected_tokens(accepted: Sequence[float]) -> list[float]:
    """Tokens of a round with k = 0, 1, ..., len(accepted): 1 + s_1 + ... + s_k, the target's own token included.

    Leviathan et al. 2022, section 3.1, with acceptance by position; for a constant rate it is `expected_tokens_at`.
    """
    return list(accumulate(accepted, initial=1.0))


def expected_tokens_at(rate: float, k: int) -> float:
    """(1 - alpha^(k+1)) / (1 - alpha): Leviathan et al. 2022, equation 1. At alpha = 1 its limit, k + 1."""
    return k + 1.0 if rate >= 1.0 else (1.0 - rate ** (k + 1)) / (1.0 - rate)


def acceptance_rate(num_accepted: float, num_ended: float) -> float | None:
    """The likeliest alpha, of rounds that had `num_accepted` accepted tokens in all, `num_ended` of which ended before
    k tokens were accepted; None of nothing.

    The maximum-likelihood estimate of a geometric law that is cut off at k: successes over trials. Accepted over
    drafted is a lower figure, as it counts the tokens behind a rejection, which were never decided.
    """
    return num_accepted / (num_accepted + num_ended) if num_accepted + num_ended > 0.0 else None


def seconds_at(seconds: Sequence[float], n: float) -> float:
    """A time at n, out of times at 0, 1, 2, ...: straight lines between and beyond them. There must be two at least."""
    before = min(int(n), len(seconds) - 2)
    return seconds[before] + (seconds[before + 1] - seconds[before]) * (n - before)


def serial_seconds(*, verify: float, draft: float, wait: float) -> float:
    """A round whose draft is made while nobody verifies: one after the other, in seconds (or in plain steps)."""
    return verify + draft + wait


def overlapped_seconds(*, verify: float, draft: float, wait: float, hit_rate: float) -> float:
    """A round whose draft is prepared during the verification before it: so often as `hit_rate` it is ready.

    A hit: the longer one of drafting and all the rest. A miss: as `serial_seconds`. With a hit rate of 1 it is the
    bound that no one-chain drafter passes (arXiv 2603.03251; 2408.11850 for the bound).
    """
    rest = verify + wait
    return hit_rate * max(rest, draft) + (1.0 - hit_rate) * (rest + draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A pair's times, in plain steps (the target's forward with one token, and what plain decoding adds to it).

    A round with k draft tokens takes 1 + k * verify_slope + k * draft + overhead of them, one after the other.
    """

    draft: float  # c: a draft token
    verify_slope: float = 0.0  # what each draft token makes the target's forward longer
    overhead: float = 0.0  # round trips and the rest, once a round
    hit_rate: float = 0.0  # how often the draft is prepared; 0: serial

    def round_steps(self, k: int) -> float:
        """How long a round with k draft tokens takes. k = 0 is plain decoding, which asks no draft."""
        if k == 0:
            return 1.0
        return overlapped_seconds(
            verify=1.0 + k * self.verify_slope, draft=k * self.draft, wait=self.overhead, hit_rate=self.hit_rate
        )


def speedup(rate: float, k: int, costs: Costs) -> float:
    """How many times as fast as plain decoding.

    (1 - alpha^(k+1)) / ((1 - alpha)(k c + 1)), Leviathan et al. 2022, theorem 3.8, where slope, overhead and hit rate
    are 0.
    """
    return expected_tokens_at(rate, k) / costs.round_steps(k)


def best_speedup(rate: float, costs: Costs, *, most: int) -> tuple[int, float]:
    """The k from 1 to `most` with the largest speed-up, and that. The first of equals."""
    return max(((k, speedup(rate, k, costs)) for k in range(1, most + 1)), key=lambda each: each[1])


def break_even(costs: Costs, *, most: int) -> float | None:
    """The acceptance rate at which the best k from 1 to `most` is as fast as plain decoding; None: no rate is enough.

    Without slope and overhead it is c (Leviathan et al. 2022, corollary 3.9). By halving: a round's time does not
    depend on the rate, its tokens rise with it.
    """

    def gain(rate: float) -> float:
        return best_speedup(rate, costs, most=most)[1] - 1.0

    low, high = 0.0, 1.0
    if gain(high) < 0.0:
        return None
    if gain(low) >= 0.0:
        return 0.0
    for _ in range(_MOST_HALVINGS):
        if high - low < _TOLERANCE:
            break
        middle = (low + high) / 2.0
        low, high = (low, middle) if gain(middle) >= 0.0 else (middle, high)
    return high
