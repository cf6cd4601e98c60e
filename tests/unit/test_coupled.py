"""The coupled rule: its noise, the token that it picks, and how often draft and target agree.

Statistical tests use fixed seeds; FALSE_ALARM (1e-6) is the probability that right code would have failed one of them
with other seeds. `smallest_visible_error` says which total-variation error each finds with probability 0.99.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from tandem.engine import coupled
from tandem.engine.coupled import choose, exponentials, verify_coupled
from tandem.engine.outcome import Outcome
from tandem.engine.sampling import law
from tandem.randomness import MAX_SEED, Purpose, uniform
from tandem.types import SamplingParams, TokenOrigin
from tests.toy_models import FALSE_ALARM, FloatArray, misfit, smallest_visible_error

PLAIN = SamplingParams()


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def rows(*laws: npt.ArrayLike) -> torch.Tensor:
    """Logits [len(laws), vocab] whose softmax are the given laws."""
    return torch.log(torch.tensor(np.stack([np.asarray(one) for one in laws]), dtype=torch.float32))


def uniforms(seed: int, position: int, vocab_size: int) -> FloatArray:
    """The noise, turned back into numbers that must be uniform on (0, 1)."""
    values: FloatArray = -np.expm1(-exponentials(seed, position, vocab_size).numpy().astype(np.float64))
    return values


# --- the noise ----------------------------------------------------------------------------------------------------

# A seed means a text only as long as these stay: a change here is a change of every seeded answer.
FROZEN = {
    (0, 0): (0.7577831, 0.38000524, 0.03095706, 1.9865042, 0.2506709, 0.8449436, 0.6745439),
    (0, 1): (1.2901117, 0.7589135, 1.283837, 0.19497311, 0.9163979, 1.8013792, 0.9213314),
    (1, 0): (0.15141511, 2.3560758, 1.3295751, 1.8930503, 2.477622, 0.18877415, 0.32054868),
    (42, 17): (1.122712, 1.9178778, 3.011301, 0.63239485, 0.21703333, 1.1956795, 0.29641125),
    (2**64 - 1, 131071): (2.0847642, 0.45795417, 3.1139057, 0.44489777, 0.2433941, 0.6421609, 0.025744535),
}


@pytest.mark.parametrize(("seed", "position"), FROZEN)
def test_the_noise_of_a_seed_is_for_ever_the_same(seed: int, position: int) -> None:
    expected = FROZEN[seed, position]
    np.testing.assert_allclose(exponentials(seed, position, len(expected)).numpy(), expected, rtol=1e-6)


def test_the_raw_bits_behind_it_are_those_of_philox_itself() -> None:
    """4x64, 10 rounds, in integers by the paper (Salmon et al. 2011): key (seed, stream), counter (1, position, 0, 0).

    NumPy counts up before it draws, hence the 1. Each 64-bit word serves two tokens, its low half first.
    """
    for seed, position in [(0, 0), (12345, 678), (MAX_SEED, 2**40)]:
        words: list[int] = []
        for block in range(3):
            words += philox_4x64((block + 1, position, 0, 0), (seed, 0x7A6E64656D))
        halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
        expected = -np.log1p(-np.minimum(((np.array(halves) + 0.5) / 2**32).astype(np.float32), 1 - 2.0**-24))
        np.testing.assert_allclose(exponentials(seed, position, 24).numpy(), expected, rtol=1e-6)


def philox_4x64(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    mask = 2**64 - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (product1 >> 64) ^ c1 ^ k0, product1 & mask, (product0 >> 64) ^ c3 ^ k1, product0 & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [c0, c1, c2, c3]


def test_a_token_has_the_same_noise_whatever_the_size_of_the_vocabulary() -> None:
    """A draft whose vocabulary is padded otherwise than the target's still shares the noise."""
    whole = exponentials(7, 9, 1001)
    for size in (1, 2, 3, 500, 1000):
        assert torch.equal(exponentials(7, 9, size), whole[:size])


def test_the_noise_is_float32_positive_and_finite_even_at_the_ends_of_the_raw_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ends:
        def __init__(self, **_: object) -> None: ...

        def random_raw(self, size: int) -> npt.NDArray[np.uint64]:
            return np.array([0, MAX_SEED] * size, dtype=np.uint64)[:size]

    monkeypatch.setattr(np.random, "Philox", Ends)
    noise = exponentials(0, 0, 4)
    assert noise.dtype is torch.float32
    assert 0.0 < float(noise[0]) < 2e-10
    assert 16.0 < float(noise[2]) < 17.0


def test_the_noise_is_uniform_over_tokens_positions_and_seeds() -> None:
    """Kolmogorov-Smirnov on 15,000 numbers along each axis: a distribution function off by 0.04 is found."""
    along = {
        "tokens": np.concatenate([uniforms(1, position, 5_000) for position in range(3)]),
        "positions": np.array([uniforms(2, position, 4)[3] for position in range(15_000)]),
        "seeds": np.array([uniforms(seed, 5, 4)[3] for seed in range(15_000)]),
    }
    for axis, numbers in along.items():
        assert stats.kstest(numbers, "uniform").pvalue > FALSE_ALARM, axis


def test_the_noise_of_neighbours_is_independent() -> None:
    """Pairs in an 8 x 8 table: next token, next position, next seed, seed and position exchanged; 15,000 each."""
    first = np.concatenate([uniforms(1, position, 3001) for position in range(10)]).reshape(10, -1)
    many = range(15_000)
    pairs = {
        "next token": (first[:, :-1].ravel(), first[:, 1:].ravel()),
        "next position": (first[:-1].ravel(), first[1:].ravel()),
        "next seed": (
            np.concatenate([uniforms(seed, 4, 3000) for seed in range(10)]),
            np.concatenate([uniforms(seed + 1, 4, 3000) for seed in range(10)]),
        ),
        "seed and position exchanged": (
            np.array([uniforms(n, n + 1, 1)[0] for n in many]),
            np.array([uniforms(n + 1, n, 1)[0] for n in many]),
        ),
    }
    law_of_pairs = np.full(64, 1 / 64)
    for name, (one, other) in pairs.items():
        cells = np.histogram2d(one, other, bins=8, range=[[0, 1], [0, 1]])[0]
        assert misfit(cells, law_of_pairs) > FALSE_ALARM, name
    assert smallest_visible_error(num_cells=64, num_trials=15_000) < 0.046


def test_the_noise_has_nothing_to_do_with_the_other_random_numbers_of_the_seed() -> None:
    """A text is verified by the noise, another of the same seed by `uniform`: paired by position and by seed."""
    law_of_pairs = np.full(64, 1 / 64)
    for purpose in Purpose:
        for by in ("position", "seed"):
            places = [(3, n) if by == "position" else (n, 3) for n in range(10_000)]
            noise = [uniforms(seed, position, 1)[0] for seed, position in places]
            others = [uniform(seed, position, purpose) for seed, position in places]
            cells = np.histogram2d(noise, others, bins=8, range=[[0, 1], [0, 1]])[0]
            assert misfit(cells, law_of_pairs) > FALSE_ALARM, (purpose, by)
    assert smallest_visible_error(num_cells=64, num_trials=10_000) < 0.06


def test_the_noise_does_not_follow_a_generator_that_others_use_with_the_same_seed() -> None:
    for other in (np.random.Philox(key=5), np.random.Philox(5), np.random.PCG64(5)):
        theirs = np.random.Generator(other).random(64)
        assert not np.allclose(uniforms(5, 0, 64), theirs, atol=1e-3)


# --- the choice ---------------------------------------------------------------------------------------------------

LAWS = {
    "flat": np.full(10, 0.1),
    "skewed": np.array([0.5, 0.25, 0.12, 0.06, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002]),
    "two": np.array([0.0, 0.9, 0.0, 0.1, 0.0]),
    "nearly certain": np.array([0.995, 0.003, 0.002]),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_choice_follows_the_law_over_seeds_and_over_positions(name: str) -> None:
    """15,000 draws each way: a total-variation error of 0.035 is found."""
    probs = torch.tensor(LAWS[name], dtype=torch.float32)
    by_seed = [choose(probs, seed=seed, position=11) for seed in range(15_000)]
    by_position = [choose(probs, seed=11, position=position) for position in range(15_000)]
    for chosen in (by_seed, by_position):
        assert misfit(np.bincount(chosen, minlength=len(probs)), LAWS[name]) > FALSE_ALARM
    assert smallest_visible_error(num_cells=len(probs), num_trials=15_000) < 0.035


def test_choices_at_neighbouring_positions_are_independent() -> None:
    """12,000 pairs of one law with itself, 4 x 4 cells."""
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    weights = torch.tensor(probs, dtype=torch.float32)
    chosen = np.array(
        [[choose(weights, seed=seed, position=position) for position in (6, 7)] for seed in range(12_000)]
    )
    cells = np.zeros((4, 4))
    np.add.at(cells, (chosen[:, 0], chosen[:, 1]), 1)
    assert misfit(cells, np.outer(probs, probs)) > FALSE_ALARM


def test_a_certain_token_always_wins_and_an_impossible_one_never() -> None:
    certain = torch.zeros(50)
    certain[17] = 1.0
    possible = torch.zeros(50)
    possible[[3, 30]] = torch.tensor([1e-30, 1.0])
    for seed in range(2_000):
        assert choose(certain, seed=seed, position=seed % 7) == 17
        assert choose(possible, seed=seed, position=seed % 7) in (3, 30)


def test_a_certain_token_wins_with_the_worst_noise_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    worst = torch.full((5,), 1e-10)
    worst[2] = -torch.log1p(torch.tensor(2.0**-24 - 1.0))
    monkeypatch.setattr(coupled, "exponentials", lambda seed, position, vocab_size: worst)
    assert choose(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), seed=0, position=0) == 2


# --- the rule -----------------------------------------------------------------------------------------------------


def test_the_rules_tokens_are_those_of_plain_decoding_whatever_was_drafted() -> None:
    """All 27 drafts of two tokens over three ids, and k = 0 and 1: the tokens up to the outcome never differ."""
    generator = np.random.default_rng(0)
    for seed in range(40):
        logits = torch.from_numpy(generator.normal(size=(3, 3)).astype(np.float32))
        plain = [verify_coupled(logits[i : i + 1], [], PLAIN, seed=seed, position=20 + i).token_id for i in range(3)]
        for drafted in [[], [0], [1], [2], *([a, b] for a in range(3) for b in range(3))]:
            outcome = verify_coupled(logits[: len(drafted) + 1], drafted, PLAIN, seed=seed, position=20)
            said = [*drafted[: outcome.num_accepted], outcome.token_id]
            assert said == plain[: len(said)]
            assert outcome.num_accepted == next(
                (i for i, token_id in enumerate(drafted) if token_id != plain[i]), len(drafted)
            )


def test_origins_are_plain_recovered_and_bonus() -> None:
    logits = rows([0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0])
    assert verify_coupled(logits[:1], [], PLAIN, seed=0, position=0) == Outcome(0, 1, TokenOrigin.PLAIN)
    assert verify_coupled(logits, [0, 2], PLAIN, seed=0, position=0) == Outcome(0, 1, TokenOrigin.RECOVERED)
    assert verify_coupled(logits, [1, 0], PLAIN, seed=0, position=0) == Outcome(1, 2, TokenOrigin.RECOVERED)
    assert verify_coupled(logits, [1, 2], PLAIN, seed=0, position=0) == Outcome(2, 0, TokenOrigin.BONUS)


def test_the_drafts_own_choice_is_always_accepted_where_the_laws_are_equal() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, size=(4, 40)).astype(np.float32))
    params = SamplingParams(temperature=0.8, top_p=0.9)
    probs = law(logits, params)
    for seed in range(300):
        drafted = [choose(probs[i], seed=seed, position=5 + i) for i in range(3)]
        assert verify_coupled(logits, drafted, params, seed=seed, position=5).num_accepted == 3


def test_a_draft_outside_the_targets_support_is_never_accepted() -> None:
    logits = rows([0.0, 0.5, 0.5], [0.2, 0.4, 0.4])
    for seed in range(500):
        outcome = verify_coupled(logits, [0], PLAIN, seed=seed, position=1)
        assert outcome.num_accepted == 0
        assert outcome.token_id in (1, 2)


@pytest.mark.parametrize("noise", [0.2, 0.7, 2.0])
def test_a_draft_is_accepted_as_often_as_the_theory_says_it_must(noise: float) -> None:
    """Daliri et al. 2024, and exactly: P(both choose x) = 1 / sum_y max(p_y / p_x, q_y / q_x), summed over x.

    It is at least (1 - d) / (1 + d), d the total-variation distance, and at most 1 - d, what the rejection rule
    reaches. 8,000 trials: a deviation of 0.028 (4.9 sigma at the worst) is an alarm of probability below 1e-6.
    """
    generator = np.random.default_rng(9)
    logits = generator.normal(0.0, 1.5, size=20)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + generator.normal(0.0, noise, size=20)))
    expected = sum(1.0 / np.maximum(p / p[x], q / q[x]).sum() for x in range(20))
    distance = 0.5 * np.abs(p - q).sum()
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    target, draft = rows(p, p), torch.tensor(q, dtype=torch.float32)
    accepted = [
        verify_coupled(target, [choose(draft, seed=seed, position=2)], PLAIN, seed=seed, position=2).num_accepted
        for seed in range(8_000)
    ]
    assert abs(np.mean(accepted) - expected) < 4.9 * np.sqrt(expected * (1 - expected) / 8_000)
    assert np.mean(accepted) > (1 - distance) / (1 + distance) - 0.028


def test_draft_noise_of_another_seed_or_position_agrees_by_chance_only() -> None:
    """What coupling buys: sum p q without it."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    weights, target = torch.tensor(p, dtype=torch.float32), rows(p, p)
    for seed_shift, position_shift in ((1, 0), (0, 1)):
        accepted = [
            verify_coupled(
                target,
                [choose(weights, seed=seed + seed_shift, position=8 + position_shift)],
                PLAIN,
                seed=seed,
                position=8,
            ).num_accepted
            for seed in range(8_000)
        ]
        chance = float((p * p).sum())
        assert abs(np.mean(accepted) - chance) < 4.9 * np.sqrt(chance * (1 - chance) / 8_000)
