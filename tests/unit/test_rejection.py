"""The rejection rule: tokens derived by hand, then the proof that what comes out follows the target's law.

The proof runs `verify` itself over whole rounds on a small Markov model, whose exact law is a matter of multiplying
two numbers. Every statistical test uses the seeds 0, 1, 2, ...; FALSE_ALARM (1e-6) is the probability that right code
would have failed it with other seeds. The same tests are run against code with one fault each, and must fail there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import qmc

from tandem.draft_law import SparseLaw, draw_sparse
from tandem.engine import rejection
from tandem.engine.outcome import Outcome
from tandem.engine.rejection import verify
from tandem.engine.sampling import law, top_law
from tandem.randomness import Purpose, uniform
from tandem.types import SamplingParams, TokenOrigin
from tests.toy_models import FALSE_ALARM, FloatArray, misfit, reference_law, smallest_visible_error

ACCEPT, TARGET, DRAFT = Purpose.ACCEPT, Purpose.TARGET, Purpose.DRAFT
PLAIN = SamplingParams()
GREEDY = SamplingParams(temperature=0.0)
BOTTOM, TOP = 0.0, 1.0 - 2.0**-53  # the smallest and the largest number that `uniform` can return

Fault = Callable[[pytest.MonkeyPatch], None]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def rows(*laws: Sequence[float]) -> torch.Tensor:
    """Logits [len(laws), vocab] whose softmax are the given laws."""
    return torch.log(torch.tensor(laws, dtype=torch.float32))


def sparse(probs: Mapping[int, float]) -> SparseLaw:
    return SparseLaw(np.array(list(probs), dtype=np.uint32), np.array(list(probs.values()), dtype=np.float32))


def script(monkeypatch: pytest.MonkeyPatch, numbers: Mapping[tuple[int, Purpose], float]) -> None:
    """Let `verify` draw these numbers, and no others."""
    monkeypatch.setattr(rejection, "uniform", lambda seed, position, purpose: numbers[position, purpose])


P = (1 / 8, 3 / 8, 1 / 2)  # the target's law in the tests by hand
Q = {0: 1 / 4, 1: 1 / 4, 2: 1 / 2}  # the draft's


@pytest.mark.parametrize("u", [BOTTOM, 0.5, TOP])
@pytest.mark.parametrize("token_id", [1, 2])
def test_a_token_that_the_target_likes_no_less_than_the_draft_is_always_accepted(
    monkeypatch: pytest.MonkeyPatch, token_id: int, u: float
) -> None:
    """p / q is 3/2 for token 1 and 1 for token 2. The bonus token's law is (0, 1, 0)."""
    script(monkeypatch, {(9, ACCEPT): u, (10, TARGET): u})
    outcome = verify(rows(P, (0, 1, 0)), [token_id], [sparse(Q)], PLAIN, seed=0, position=9)
    assert outcome == Outcome(1, 1, TokenOrigin.BONUS)


@pytest.mark.parametrize("laws", [None, [sparse({0: 0.5, 1: 0.5})]])
@pytest.mark.parametrize("u", [BOTTOM, TOP])
def test_a_token_that_the_target_never_says_is_never_accepted(
    monkeypatch: pytest.MonkeyPatch, u: float, laws: list[SparseLaw] | None
) -> None:
    """p(0) is 0, so even u = 0 rejects, and the only token left is 1 (of the deterministic draft: 1 or 2)."""
    script(monkeypatch, {(0, ACCEPT): u, (0, TARGET): BOTTOM})
    outcome = verify(rows((0, 0.75, 0.25), P), [0], laws, PLAIN, seed=0, position=0)
    assert outcome == Outcome(0, 1, TokenOrigin.RECOVERED)


@pytest.mark.parametrize(("u", "accepted"), [(BOTTOM, True), (0.499, True), (0.501, False), (TOP, False)])
def test_a_token_is_accepted_with_probability_p_over_q(
    monkeypatch: pytest.MonkeyPatch, u: float, accepted: bool
) -> None:
    """p(0) / q(0) = 1/2. After a rejection max(0, p - q) = (0, 1/8, 0): token 1, whatever is drawn."""
    script(monkeypatch, {(4, ACCEPT): u, (4, TARGET): TOP, (5, TARGET): TOP})
    outcome = verify(rows(P, (0, 0, 1)), [0], [sparse(Q)], PLAIN, seed=0, position=4)
    assert outcome == (Outcome(1, 2, TokenOrigin.BONUS) if accepted else Outcome(0, 1, TokenOrigin.RECOVERED))


@pytest.mark.parametrize(
    ("accept", "target", "expected"),
    [
        (0.124, 0.0, Outcome(1, 0, TokenOrigin.BONUS)),
        (0.126, 0.0, Outcome(0, 1, TokenOrigin.RECOVERED)),
        (0.126, 0.428, Outcome(0, 1, TokenOrigin.RECOVERED)),  # 3/7 = 0.4286
        (0.126, 0.429, Outcome(0, 2, TokenOrigin.RECOVERED)),
        (TOP, TOP, Outcome(0, 2, TokenOrigin.RECOVERED)),
    ],
)
def test_a_deterministic_draft_is_accepted_with_probability_p(
    monkeypatch: pytest.MonkeyPatch, accept: float, target: float, expected: Outcome
) -> None:
    """p(0) = 1/8. After a rejection p without token 0: 3/7 for token 1, 4/7 for token 2."""
    script(monkeypatch, {(0, ACCEPT): accept, (0, TARGET): target, (1, TARGET): target})
    assert verify(rows(P, (1, 0, 0)), [0], None, PLAIN, seed=0, position=0) == expected


def test_nothing_behind_the_first_rejection_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three drafted tokens: the first stands, the second is rejected, the third would have been accepted."""
    script(monkeypatch, {(0, ACCEPT): 0.9, (1, ACCEPT): 0.51, (1, TARGET): 0.3})
    laws = [sparse(Q), sparse(Q), sparse(Q)]
    assert verify(rows(P, P, P, P), [2, 0, 2], laws, PLAIN, seed=0, position=0) == Outcome(1, 1, TokenOrigin.RECOVERED)


def test_each_position_uses_its_own_numbers_and_its_own_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """All accepted with p / q = 1/2 at each position; the bonus token is drawn at position 3."""
    script(monkeypatch, {(0, ACCEPT): 0.49, (1, ACCEPT): 0.49, (2, ACCEPT): 0.49, (3, TARGET): 0.9})
    target = rows((1 / 4, 3 / 4, 0), (0, 1 / 4, 3 / 4), (3 / 4, 0, 1 / 4), (0.8, 0.0, 0.2))
    laws = [sparse({0: 0.5, 1: 0.5}), sparse({1: 0.5, 2: 0.5}), sparse({2: 0.5, 0: 0.5})]
    assert verify(target, [0, 1, 2], laws, PLAIN, seed=0, position=0) == Outcome(3, 2, TokenOrigin.BONUS)


@pytest.mark.parametrize(("u", "token_id"), [(0.124, 0), (0.126, 1), (0.499, 1), (0.501, 2)])
def test_without_a_draft_it_is_plain_decoding(monkeypatch: pytest.MonkeyPatch, u: float, token_id: int) -> None:
    script(monkeypatch, {(6, TARGET): u})
    for laws in (None, list[SparseLaw]()):
        assert verify(rows(P), [], laws, PLAIN, seed=0, position=6) == Outcome(0, token_id, TokenOrigin.PLAIN)


def test_a_plain_token_is_the_draw_of_its_position_from_the_law() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 30)).astype(np.float32))
    cumulative = reference_law(logits[0].numpy(), PLAIN, [0], prompt_length=1).cumsum()
    for seed in range(200):
        expected = int(np.searchsorted(cumulative, uniform(seed, 31, TARGET), side="right"))
        assert verify(logits, [], None, PLAIN, seed=seed, position=31).token_id == expected


@pytest.mark.parametrize("laws", [None, [sparse({1: 0.5, 2: 0.5})] * 3])
@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        ([2, 0, 1], Outcome(3, 2, TokenOrigin.BONUS)),
        ([2, 0, 2], Outcome(2, 1, TokenOrigin.RECOVERED)),
        ([2, 1, 1], Outcome(1, 0, TokenOrigin.RECOVERED)),
        ([0, 0, 1], Outcome(0, 2, TokenOrigin.RECOVERED)),
    ],
)
def test_at_temperature_zero_a_token_is_accepted_iff_it_is_the_argmax(
    drafted: list[int], expected: Outcome, laws: list[SparseLaw] | None
) -> None:
    target = rows((0.2, 0.3, 0.5), (0.5, 0.3, 0.2), (0.2, 0.5, 0.3), (0.1, 0.2, 0.7))
    for params in (GREEDY, SamplingParams(temperature=1e-6)):
        assert verify(target, drafted, laws, params, seed=5, position=7) == expected


def test_at_temperature_zero_ties_break_to_the_lowest_id() -> None:
    target = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert verify(target, [1], None, GREEDY, seed=0, position=0) == Outcome(1, 0, TokenOrigin.BONUS)
    assert verify(target, [2], None, GREEDY, seed=0, position=0) == Outcome(0, 1, TokenOrigin.RECOVERED)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_draft_with_the_targets_own_law_is_always_accepted(temperature: float) -> None:
    """Even with the largest numbers that can be drawn, since q is then the very float32 number p."""
    params = SamplingParams(temperature=temperature)
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3, size=(1, 50)).astype(np.float32)).repeat(2, 1)
    probs = law(logits, params)[0].numpy()
    own = SparseLaw(np.arange(50, dtype=np.uint32), probs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "uniform", lambda seed, position, purpose: TOP)
        for token_id in range(50):
            assert verify(logits, [token_id], [own], params, seed=0, position=0).num_accepted == 1


def test_a_rejection_by_rounding_alone_still_answers_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft law that is nowhere below the target's (it sums to 1.0005, which the contract lets pass)."""
    script(monkeypatch, {(0, ACCEPT): TOP, (0, TARGET): 0.3})
    above = sparse({0: 0.125 * 1.0005, 1: 0.375 * 1.0005, 2: 0.5 * 1.0005})
    assert verify(rows(P, P), [0], [above], PLAIN, seed=0, position=0) == Outcome(0, 1, TokenOrigin.RECOVERED)


@dataclass(frozen=True, kw_only=True)
class Markov:
    """A target and a draft whose law depends on the token before only, and how they play together.

    `draft_logits` None: the draft always proposes `favourite[previous]`, deterministically. `law_size` cuts the
    draft's law to its most probable tokens. `sent` are the laws that `verify` is told of, where they differ (a fault).
    """

    target_logits: npt.NDArray[np.float32]  # [vocab, vocab]
    draft_logits: npt.NDArray[np.float32] | None
    k: int
    params: SamplingParams = PLAIN
    law_size: int = 1_000
    sent_logits: npt.NDArray[np.float32] | None = None
    always_most_probable: bool = False
    laws: list[SparseLaw] = field(init=False)
    sent: list[SparseLaw] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "laws", self._laws(self.draft_logits))
        object.__setattr__(self, "sent", self.laws if self.sent_logits is None else self._laws(self.sent_logits))

    def _laws(self, logits: npt.NDArray[np.float32] | None) -> list[SparseLaw]:
        if logits is None:
            return []
        return [top_law(probs, self.law_size) for probs in law(torch.from_numpy(logits), self.params)]

    @property
    def vocab_size(self) -> int:
        return len(self.target_logits)

    def target_probs(self) -> FloatArray:
        """[previous, next], in float64."""
        return np.stack([reference_law(row, self.params, [0], prompt_length=1) for row in self.target_logits])

    def draft_probs(self) -> FloatArray:
        """[previous, next], the very numbers that are sent."""
        dense = np.zeros((self.vocab_size, self.vocab_size))
        if self.draft_logits is None:
            dense[np.arange(self.vocab_size), [self.favourite(token_id) for token_id in range(self.vocab_size)]] = 1.0
        for previous, sent in enumerate(self.laws):
            dense[previous, sent.token_ids.astype(np.int64)] = sent.probs
        return dense

    def favourite(self, previous: int) -> int:
        """The target's second choice: often right, more often wrong."""
        return int(np.argsort(-self.target_logits[previous], kind="stable")[1])

    def draft(self, previous: int, *, seed: int, position: int) -> tuple[list[int], list[SparseLaw] | None]:
        text = [previous]
        for i in range(self.k):
            if self.draft_logits is None:
                text.append(self.favourite(text[-1]))
            elif self.always_most_probable:
                text.append(int(self.laws[text[-1]].token_ids[0]))
            else:
                text.append(draw_sparse(self.laws[text[-1]], uniform(seed, position + i, DRAFT)))
        return text[1:], None if self.draft_logits is None else [self.sent[token_id] for token_id in text[:-1]]

    def round(self, previous: int, *, seed: int, position: int) -> tuple[list[int], Outcome]:
        """The drafted tokens, and what became of them."""
        drafted, laws = self.draft(previous, seed=seed, position=position)
        logits = torch.from_numpy(self.target_logits[[previous, *drafted]])
        return drafted, verify(logits, drafted, laws, self.params, seed=seed, position=position)


@dataclass
class Tally:
    """What many texts, one a seed, began with after token 0, and how their drafts fared."""

    pairs: npt.NDArray[np.int64]  # [vocab, vocab]: first two tokens
    drafted: int = 0
    accepted: int = 0


def play(model: Markov, num_trials: int) -> Tally:
    """The first two tokens of `num_trials` texts, through as many rounds as they take."""
    tally = Tally(np.zeros((model.vocab_size, model.vocab_size), dtype=np.int64))
    for seed in range(num_trials):
        text = [0]
        while len(text) < 3:
            drafted, outcome = model.round(text[-1], seed=seed, position=len(text))
            text += [*drafted[: outcome.num_accepted], outcome.token_id]
            tally.drafted += len(drafted)
            tally.accepted += outcome.num_accepted
        tally.pairs[text[1], text[2]] += 1
    return tally


def exact_pairs(model: Markov) -> FloatArray:
    """The law of the first two tokens in plain decoding."""
    target_probs = model.target_probs()
    pairs: FloatArray = target_probs[0][:, None] * target_probs
    return pairs


def normal(seed: int, vocab_size: int, *, scale: float) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, (vocab_size, vocab_size)).astype(np.float32)


def related(seed: int, vocab_size: int, *, noise: float, scale: float = 1.5) -> tuple[npt.NDArray[np.float32], ...]:
    """Logits of a target, and of a draft that differs from it by `noise`."""
    target_logits = normal(seed, vocab_size, scale=scale)
    return target_logits, target_logits + normal(seed + 1000, vocab_size, scale=noise)


def without(logits: npt.NDArray[np.float32], *token_ids: int) -> npt.NDArray[np.float32]:
    logits = logits.copy()
    logits[:, list(token_ids)] = -np.inf
    return logits


GOOD_10, NEAR_10 = related(1, 10, noise=1.0)
GOOD_12, NEAR_12 = related(2, 12, noise=1.5)
GOOD_20, NEAR_20 = related(3, 20, noise=1.0)
GOOD_50, NEAR_50 = related(4, 50, noise=0.7, scale=3.0)

MODELS = {
    "one drafted token": Markov(target_logits=GOOD_10, draft_logits=NEAR_10, k=1),
    "four drafted tokens, temperature 0.7": Markov(
        target_logits=GOOD_10, draft_logits=NEAR_10, k=4, params=SamplingParams(temperature=0.7)
    ),
    "a draft with nothing in common": Markov(
        target_logits=GOOD_10, draft_logits=normal(77, 10, scale=2.0), k=2, params=SamplingParams(temperature=1.6)
    ),
    "supports that overlap by half": Markov(
        target_logits=without(GOOD_12, 0, 1, 2, 3), draft_logits=without(NEAR_12, 8, 9, 10, 11), k=2
    ),
    "a sparse law of three tokens": Markov(target_logits=GOOD_12, draft_logits=NEAR_12, k=3, law_size=3),
    "a law of one token, sampled": Markov(target_logits=GOOD_10, draft_logits=NEAR_10, k=2, law_size=1),
    "a deterministic draft": Markov(target_logits=GOOD_10, draft_logits=None, k=1),
    "four tokens of a deterministic draft": Markov(
        target_logits=GOOD_12, draft_logits=None, k=4, params=SamplingParams(temperature=0.8)
    ),
    "top_k 4 and min_p": Markov(
        target_logits=GOOD_20,
        draft_logits=NEAR_20,
        k=3,
        params=SamplingParams(temperature=1.5, top_k=4, min_p=0.1),
        law_size=5,
    ),
    "fifty tokens, top_p 0.9": Markov(
        target_logits=GOOD_50, draft_logits=NEAR_50, k=2, params=SamplingParams(temperature=0.9, top_p=0.9)
    ),
}
TRIALS = 4_000


@pytest.mark.parametrize("name", MODELS)
def test_the_first_two_tokens_follow_the_targets_law(name: str) -> None:
    """Chi-square of the joint law of 4,000 texts' first two tokens; false alarm 1e-6.

    In the 7 to 92 cells that are left after pooling it sees a total-variation error of 0.093 at worst, and 0.069 in the
    first token alone; the integration below sees 0.004.
    """
    tally = play(MODELS[name], TRIALS)
    assert misfit(tally.pairs, exact_pairs(MODELS[name])) > FALSE_ALARM
    assert misfit(tally.pairs.sum(axis=1), exact_pairs(MODELS[name]).sum(axis=1)) > FALSE_ALARM
    assert 0 < tally.accepted < tally.drafted


def test_disjoint_supports_reject_every_token_and_follow_the_targets_law() -> None:
    model = Markov(target_logits=without(GOOD_10, 0, 2, 4, 6, 8), draft_logits=without(NEAR_10, 1, 3, 5, 7, 9), k=2)
    tally = play(model, TRIALS)
    assert misfit(tally.pairs, exact_pairs(model)) > FALSE_ALARM
    assert (tally.accepted, tally.drafted) == (0, 2 * 2 * TRIALS)


def test_equal_laws_accept_every_token_and_follow_the_targets_law() -> None:
    model = Markov(target_logits=GOOD_10, draft_logits=GOOD_10, k=2)
    tally = play(model, TRIALS)
    assert misfit(tally.pairs, exact_pairs(model)) > FALSE_ALARM
    assert tally.drafted == 2 * TRIALS
    assert tally.accepted > 0.9999 * tally.drafted  # top_law's sum may round q above p by one part in 10 million


def test_the_chi_square_test_sees_what_its_docstring_says() -> None:
    assert smallest_visible_error(num_cells=92, num_trials=TRIALS) < 0.093
    assert smallest_visible_error(num_cells=12, num_trials=TRIALS) < 0.069


FIRST = 1  # the position of the first token after token 0
STRATA_TRIALS = 10_000


def exact_outcomes(model: Markov) -> dict[str, FloatArray]:
    """The law of the first round with k = 2 from token 0, by what became of the draft: all in all they sum to 1.

    recovered [r]: the first token was rejected; accepted then recovered [d, r]; both accepted, then bonus [d, e, b].
    """
    p, q = model.target_probs(), model.draft_probs()
    both, residual = np.minimum(p, q), np.maximum(p - q, 0.0)
    return {
        "recovered": residual[0],
        "accepted, recovered": both[0][:, None] * residual,
        "accepted, accepted, bonus": both[0][:, None, None] * both[:, :, None] * p[None, :, :],
    }


@pytest.fixture(scope="module", params=["sampled", "sparse", "deterministic"])
def first_rounds(request: pytest.FixtureRequest) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, FloatArray]]:
    """Counts of 10,000 first rounds with k = 2, and the exact law."""
    target_logits, draft_logits = related(6, 10, noise=1.2)
    model = Markov(
        target_logits=target_logits,
        draft_logits=None if request.param == "deterministic" else draft_logits,
        k=2,
        law_size=4 if request.param == "sparse" else 10,
    )
    exact = exact_outcomes(model)
    counts = {name: np.zeros(probs.shape, dtype=np.int64) for name, probs in exact.items()}
    for seed in range(STRATA_TRIALS):
        drafted, outcome = model.round(0, seed=seed, position=FIRST)
        assert (outcome.origin is TokenOrigin.BONUS) == (outcome.num_accepted == 2)
        name = list(exact)[outcome.num_accepted]
        counts[name][(*drafted[: outcome.num_accepted], outcome.token_id)] += 1
    return counts, exact


def test_every_outcome_of_a_round_has_its_exact_probability(
    first_rounds: tuple[dict[str, npt.NDArray[np.int64]], dict[str, FloatArray]],
) -> None:
    """Accepted or not, at which position, and what followed, as one law of 1,110 cells. False alarm 1e-6.

    In the at most 149 cells left after pooling it sees a total-variation error of 0.065, and 0.038 in which of the
    three ways a round goes.
    """
    counts, exact = first_rounds
    assert smallest_visible_error(num_cells=149, num_trials=STRATA_TRIALS) < 0.065
    assert smallest_visible_error(num_cells=3, num_trials=STRATA_TRIALS) < 0.038
    flat = np.concatenate([counts[name].reshape(-1) for name in exact])
    assert misfit(flat, np.concatenate([probs.reshape(-1) for probs in exact.values()])) > FALSE_ALARM
    ways = [int(counts[name].sum()) for name in exact]
    assert misfit(ways, [probs.sum() for probs in exact.values()]) > FALSE_ALARM
    assert all(ways)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("recovered", 0),
        ("accepted, recovered", 0),
        ("accepted, recovered", 1),
        ("accepted, accepted, bonus", 0),
        ("accepted, accepted, bonus", 1),
        ("accepted, accepted, bonus", 2),
    ],
)
def test_accepted_recovered_and_bonus_tokens_each_follow_their_own_law(
    first_rounds: tuple[dict[str, npt.NDArray[np.int64]], dict[str, FloatArray]], name: str, axis: int
) -> None:
    """One stratum, one place in it: ten cells, at least 300 rounds, false alarm 1e-6. With the 2,000 rounds that most
    strata have it sees a total-variation error of 0.1."""
    counts, exact = first_rounds
    assert smallest_visible_error(num_cells=10, num_trials=2_000) < 0.1
    others = tuple(other for other in range(exact[name].ndim) if other != axis)
    seen, probs = counts[name].sum(axis=others), exact[name].sum(axis=others)
    assert seen.sum() >= 300
    assert misfit(seen, probs / probs.sum()) > FALSE_ALARM


def integrated_error(model: Markov, monkeypatch: pytest.MonkeyPatch, *, num_points: int) -> float:
    """The total-variation error of the first token with k = 1, by integrating over what would be random.

    The token is a function of three numbers in [0, 1). Over a Sobol net of them, as evenly spread as points can be,
    frequencies come within about num_points^(-2/3) of probabilities, where random numbers reach num_points^(-1/2).
    """
    counts = np.zeros(model.vocab_size)
    for draft, accept, target in qmc.Sobol(3, rng=1).random(num_points):
        numbers = {DRAFT: float(draft), ACCEPT: float(accept), TARGET: float(target)}
        monkeypatch.setattr(rejection, "uniform", lambda seed, position, purpose, numbers=numbers: numbers[purpose])
        token_id = draw_sparse(model.laws[0], numbers[DRAFT]) if model.laws else model.favourite(0)
        logits = torch.from_numpy(model.target_logits[[0, token_id]])
        outcome = verify(logits, [token_id], model.sent[:1] or None, model.params, seed=0, position=0)
        counts[token_id if outcome.num_accepted else outcome.token_id] += 1
    return 0.5 * float(np.abs(counts / num_points - model.target_probs()[0]).sum())


@pytest.mark.parametrize("name", ["one drafted token", "a sparse law of three tokens", "a deterministic draft"])
def test_integrating_over_the_random_numbers_gives_the_targets_law(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No statistics: 4,096 points of a Sobol net find a total-variation error above 0.004."""
    assert integrated_error(MODELS[name], monkeypatch, num_points=4096) < 0.004


# Faults that have been made elsewhere. Each is put into the code above, or into how the draft is drawn.


def _recovered_from_the_whole_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_residual", lambda target_probs, token_id, draft_law: target_probs)


def _recovered_by_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    true_residual = rejection._residual

    def one_hot(target_probs: torch.Tensor, token_id: int, draft_law: SparseLaw | None) -> torch.Tensor:
        residual = true_residual(target_probs, token_id, draft_law)
        return torch.nn.functional.one_hot(residual.argmax(), len(residual)).to(torch.float32)

    monkeypatch.setattr(rejection, "_residual", one_hot)


def _accepted_with_the_drafts_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {ACCEPT: DRAFT, TARGET: TARGET}
    monkeypatch.setattr(rejection, "uniform", lambda seed, position, purpose: uniform(seed, position, wrong[purpose]))


def _recovered_with_the_number_that_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniform", lambda seed, position, purpose: uniform(seed, position, ACCEPT))


def _no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


def in_bfloat16(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.asarray(torch.from_numpy(logits).to(torch.bfloat16).to(torch.float32).numpy())


# Real models' logits are often far from 0; at 260 bfloat16 has steps of 2, so that its softmax is visibly coarse.
FAR_10 = NEAR_10 + np.float32(260.0)

FAULTY: dict[str, tuple[Markov, Fault]] = {
    "recovered tokens from the target's whole law": (MODELS["one drafted token"], _recovered_from_the_whole_law),
    "the same with a deterministic draft": (MODELS["a deterministic draft"], _recovered_from_the_whole_law),
    "recovered tokens by argmax (mistral.rs#2424)": (MODELS["one drafted token"], _recovered_by_argmax),
    "the draft's argmax with its softmax as law (transformers#32867)": (
        Markov(target_logits=GOOD_10, draft_logits=NEAR_10, k=1, always_most_probable=True),
        _no_fault,
    ),
    "draft law computed in bfloat16, sampled in float32 (DeepSpec#31)": (
        Markov(target_logits=GOOD_10, draft_logits=FAR_10, sent_logits=in_bfloat16(FAR_10), k=1),
        _no_fault,
    ),
    "one number for drafting and accepting": (MODELS["one drafted token"], _accepted_with_the_drafts_own_number),
    "one number for rejecting and recovering": (MODELS["one drafted token"], _recovered_with_the_number_that_rejected),
}

# Those in the rule itself; integration chooses the numbers and draws the draft.
INTEGRABLE = [name for name, (model, _) in FAULTY.items() if not model.always_most_probable and "number" not in name]


@pytest.mark.parametrize("name", FAULTY)
def test_the_same_test_fails_when_the_rule_is_broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Negative controls: 4,000 texts are enough to see each of these faults."""
    model, fault = FAULTY[name]
    fault(monkeypatch)
    tally = play(model, TRIALS)
    assert misfit(tally.pairs, exact_pairs(model)) < FALSE_ALARM
    assert misfit(tally.pairs.sum(axis=1), exact_pairs(model).sum(axis=1)) < FALSE_ALARM
    assert 0 < tally.accepted < tally.drafted


@pytest.mark.parametrize("name", INTEGRABLE)
def test_integration_sees_a_broken_rule_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With 1,024 points the sound rule comes within 0.006, and each of these faults is further off than 0.03."""
    model, fault = FAULTY[name]
    fault(monkeypatch)
    assert integrated_error(model, monkeypatch, num_points=1024) > 0.03


def test_a_repeated_round_has_the_same_outcome() -> None:
    """There is no generator that a first attempt could have advanced."""
    model = MODELS["four drafted tokens, temperature 0.7"]
    for seed in range(100):
        first = model.round(0, seed=seed, position=FIRST)
        assert model.round(0, seed=seed, position=FIRST) == first
