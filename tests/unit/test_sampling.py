"""The law at each position against plain float64 loops (`reference_law`), and draws against exact intervals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.engine.sampling import adjusted_logits, draw, law
from tandem.types import SamplingParams
from tests.toy_models import reference_law, reference_logits

SEEDED = settings(max_examples=150, deadline=None, derandomize=True, database=None)
VOCAB = 12
PLAIN = SamplingParams()

# Logits in quarters, so that ties are common and borders between different values are wider than float32's rounding.
LOGITS = st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)
IDS = st.integers(0, VOCAB - 1)

CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from((0.0, 0.3, 0.7, 1.0, 1.9)),
    "top_k": st.sampled_from((0, 1, 2, 5, VOCAB, VOCAB + 3)),
    "top_p": st.sampled_from((0.05, 0.5, 0.9, 0.999, 1.0)),
    "min_p": st.sampled_from((0.0, 0.01, 0.2, 1.0)),
    "presence_penalty": st.sampled_from((-2.0, 0.0, 0.6, 2.0)),
    "frequency_penalty": st.sampled_from((-0.5, 0.0, 0.3, 2.0)),
    "repetition_penalty": st.sampled_from((0.5, 1.0, 1.3)),
    "logit_bias": st.dictionaries(IDS, st.sampled_from((-100.0, -1.5, 3.0)), max_size=3).map(lambda d: (*d.items(),)),
    "banned_token_ids": st.lists(IDS, max_size=3, unique=True).map(tuple),
}


def to_tensor(rows: npt.ArrayLike) -> torch.Tensor:
    return torch.tensor(np.atleast_2d(np.asarray(rows, dtype=np.float32)))


def law_of(logits: list[float], params: SamplingParams) -> npt.NDArray[np.float32]:
    return np.asarray(law(to_tensor(logits), params)[0].numpy())


def assert_close_laws(actual: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    """The same support (but for what float32 cannot hold), and float32's precision."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert ((actual > 1e-30) == (expected > 1e-30)).all()
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-9)


def on_the_border(logits: list[float], params: SamplingParams, tokens: list[int], *, prompt_length: int) -> bool:
    """Whether some token's fate hangs on the last bits: the law's support changes when limits move by 1e-5."""
    narrow, wide = (
        reference_law(logits, shifted, tokens, prompt_length=prompt_length)
        for shifted in (_with_limits_moved(params, by=1e-5), _with_limits_moved(params, by=-1e-5))
    )
    return bool(((narrow > 0) != (wide > 0)).any())


def _with_limits_moved(params: SamplingParams, *, by: float) -> SamplingParams:
    top_p = params.top_p * (1 - by) if params.top_p < 1.0 else 1.0
    return replace(params, top_p=top_p, min_p=min(1.0, params.min_p * (1 + by)))


def check_against_reference(
    logits: list[float], params: SamplingParams, tokens: list[int], *, prompt_length: int
) -> None:
    if on_the_border(logits, params, tokens, prompt_length=prompt_length):
        return
    adjusted = adjusted_logits(to_tensor(logits), params, tokens, prompt_length=prompt_length)
    expected = reference_law(logits, params, tokens, prompt_length=prompt_length)
    assert_close_laws(law(adjusted, params)[0].numpy(), expected)


@pytest.mark.parametrize("name", CHOICES)
def test_each_parameter_alone_agrees_with_the_reference(name: str) -> None:
    @settings(SEEDED, max_examples=60)
    @given(logits=LOGITS, value=CHOICES[name], tokens=st.lists(IDS, min_size=1, max_size=8), data=st.data())
    def check(logits: list[float], value: Any, tokens: list[int], data: st.DataObject) -> None:
        params = SamplingParams(**{name: value})
        check_against_reference(logits, params, tokens, prompt_length=data.draw(st.integers(1, len(tokens))))

    check()


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(CHOICES, 2)])
def test_each_pair_of_parameters_agrees_with_the_reference(first: str, second: str) -> None:
    @settings(SEEDED, max_examples=12)
    @given(
        logits=LOGITS, values=st.tuples(CHOICES[first], CHOICES[second]), tokens=st.lists(IDS, min_size=2, max_size=8)
    )
    def check(logits: list[float], values: tuple[Any, Any], tokens: list[int]) -> None:
        params = SamplingParams(**{first: values[0], second: values[1]})
        check_against_reference(logits, params, tokens, prompt_length=len(tokens) // 2)

    check()


@SEEDED
@given(logits=LOGITS, chosen=st.fixed_dictionaries(CHOICES), tokens=st.lists(IDS, min_size=2, max_size=8))
def test_all_parameters_together_agree_with_the_reference(
    logits: list[float], chosen: dict[str, Any], tokens: list[int]
) -> None:
    check_against_reference(logits, SamplingParams(**chosen), tokens, prompt_length=len(tokens) // 2)


@SEEDED
@given(
    rows=st.lists(LOGITS, min_size=1, max_size=5),
    tokens=st.lists(IDS, min_size=6, max_size=12),
    prompt_length=st.integers(1, 6),
    min_tokens=st.integers(0, 8),
    presence=CHOICES["presence_penalty"],
    frequency=CHOICES["frequency_penalty"],
    repetition=CHOICES["repetition_penalty"],
)
def test_every_row_sees_just_its_own_prefix_with_the_drafted_tokens_in_it(
    rows: list[list[float]],
    tokens: list[int],
    prompt_length: int,
    min_tokens: int,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    params = SamplingParams(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        min_tokens=min_tokens,
        end_token_ids=(3, 5),
        logit_bias=((3, 1.0),),
    )
    tokens = [*range(prompt_length), *tokens]  # so that no row's prefix ends inside the prompt
    given_logits = to_tensor(rows)
    adjusted = adjusted_logits(given_logits, params, tokens, prompt_length=prompt_length)
    for row, logits in enumerate(rows):
        prefix = tokens[: len(tokens) - len(rows) + 1 + row]
        expected = reference_logits(logits, params, prefix, prompt_length=prompt_length)
        np.testing.assert_allclose(adjusted[row].numpy(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(given_logits, to_tensor(rows)), "the runner's tensor was changed"


def test_penalties_by_hand() -> None:
    """Prompt (0, 1), generated (1, 2, 2): repetition sees 0, 1 and 2; presence and frequency only 1 and 2."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    adjusted = adjusted_logits(to_tensor([4.0, 4.0, -4.0, 4.0]), params, [0, 1, 1, 2, 2], prompt_length=2)
    assert adjusted[0].tolist() == [2.0, 2.0 - 0.25 - 0.5, -8.0 - 2 * 0.25 - 0.5, 4.0]


def test_a_drafted_token_is_penalised_behind_itself_and_not_before() -> None:
    params = SamplingParams(presence_penalty=2.0)
    adjusted = adjusted_logits(torch.zeros(3, 4), params, [0, 3, 1], prompt_length=1)  # 3 and 1 are drafted
    assert adjusted.tolist() == [[0, 0, 0, 0], [0, 0, 0, -2], [0, -2, 0, -2]]


def test_end_tokens_are_banned_up_to_the_last_token_before_min_tokens() -> None:
    """One token generated, 3 drafted: the rows choose the 2nd to the 5th. With min_tokens 3 the 4th may be the end."""
    params = SamplingParams(min_tokens=3, end_token_ids=(0, 2))
    adjusted = adjusted_logits(torch.zeros(4, 3), params, [1, 1, 1, 1, 1], prompt_length=1)
    inf = float("inf")
    assert adjusted.tolist() == [[-inf, 0, -inf], [-inf, 0, -inf], [0, 0, 0], [0, 0, 0]]


def test_a_session_reopened_in_mid_answer_counts_what_was_generated_before() -> None:
    params = SamplingParams(min_tokens=2, end_token_ids=(0,), frequency_penalty=1.0)
    adjusted = adjusted_logits(torch.zeros(1, 3), params, [0, 1, 2, 2], prompt_length=2)
    assert adjusted.tolist() == [[0, 0, -2]]


def test_min_tokens_without_end_tokens_changes_nothing_and_copies_nothing() -> None:
    logits = torch.zeros(2, 3)
    assert adjusted_logits(logits, SamplingParams(min_tokens=9), [0, 1, 2], prompt_length=1) is logits


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-7, 1e-6, 9.9e-6, 1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_is_finite_and_equal_to_greedy(temperature: float) -> None:
    """Reported elsewhere as vllm#3063: quotients that overflow. Here even logits of 1e4, and banned ones."""
    logits = to_tensor(
        [
            [3.0, 9.5, -2.0, 9.0],
            [1e4, -1e4, 0.0, 9e3],
            [3e38, 2e38, 0.0, -3e38],
            [-1e30, -3e38, -1e38, -1e36],
            [0.0, 2.0, 5.0, 1.0],
        ]
    )
    logits[4, 2] = -torch.inf
    probs = law(logits, SamplingParams(temperature=temperature, top_p=0.9, top_k=3, min_p=0.1))
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1e-8])
def test_greedy_ties_go_to_the_lowest_id(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert law_of([1.0, 5.0, 5.0, 5.0], params).tolist() == [0, 1, 0, 0]
    wide = torch.zeros(1, 50_000)
    wide[0, [49_000, 777, 30_000]] = 1.0
    assert int(law(wide, params).argmax()) == 777


def test_ties_at_the_border_of_top_k_top_p_and_min_p_stay_together() -> None:
    logits = [0.0, 2.0, 1.0, 1.0, 1.0, -3.0]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6), SamplingParams(min_p=0.36)):
        assert (law_of(logits, params) > 0).tolist() == [False, True, True, True, True, False], params


def test_a_nucleus_whose_mass_is_just_top_p_takes_no_more() -> None:
    logits = [1.0, 0.0]
    first = float(law_of(logits, PLAIN)[0])
    assert law_of(logits, SamplingParams(top_p=first)).tolist() == [1, 0]


def test_the_law_does_not_depend_on_where_equal_values_stand() -> None:
    rng = np.random.default_rng(1)
    logits = rng.integers(-3, 4, size=VOCAB).astype(float)
    order = rng.permutation(VOCAB)
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.8, min_p=0.05)
    assert_close_laws(law_of(list(logits[order]), params), law_of(list(logits), params)[order])


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.97])
@pytest.mark.parametrize("vocab", [511, 512, 513, 1500, 5000])
def test_a_nucleus_is_found_however_wide_it_is(vocab: int, top_p: float) -> None:
    """Nearly flat laws, whose nucleus is most of the vocabulary; the second row's is narrow."""
    rng = np.random.default_rng(vocab)
    rows = np.stack([rng.normal(0, 0.3, vocab), rng.normal(0, 6.0, vocab)])
    params = SamplingParams(top_p=top_p)
    actual = law(to_tensor(rows), params).numpy()
    for row, logits in enumerate(rows):
        expected = reference_law(logits.astype(np.float32), params, [0], prompt_length=1)
        assert abs(int((actual[row] > 0).sum()) - int((expected > 0).sum())) <= 1  # the border is a matter of rounding
        assert np.abs(actual[row] - expected).sum() < 1e-3
    if vocab == 5000 and top_p > 0.5:
        assert (actual[0] > 0).sum() > 2000 > 500 > (actual[1] > 0).sum()


def test_the_most_probable_token_survives_the_smallest_limits() -> None:
    params = SamplingParams(top_p=1e-45, top_k=1, min_p=1.0)
    assert law_of([0.0, 1.0, 0.5], params).tolist() == [0, 1, 0]


def test_banned_tokens_have_probability_zero_even_with_the_largest_bias() -> None:
    params = SamplingParams(banned_token_ids=(1, 2), logit_bias=((1, 100.0),), temperature=2.0)
    logits = adjusted_logits(torch.zeros(3, 4), params, [0, 0, 0], prompt_length=1)
    assert law(logits, params).tolist() == [[0.5, 0, 0, 0.5]] * 3
    greedy = replace(params, temperature=0.0)
    assert law(logits, greedy).tolist() == [[1, 0, 0, 0]] * 3


def test_a_bias_of_minus_100_leaves_nothing_to_draw() -> None:
    params = SamplingParams(logit_bias=((0, -100.0),))
    logits = adjusted_logits(torch.zeros(1, 3), params, [0], prompt_length=1)
    assert float(law(logits, params)[0, 0]) < 1e-40


def test_rows_sum_to_one_at_the_size_of_a_real_vocabulary() -> None:
    rows = np.random.default_rng(5).normal(0, 3, (3, 49_152))
    for params in (PLAIN, SamplingParams(temperature=2.0, top_p=0.95), SamplingParams(top_k=40, min_p=0.02)):
        sums = law(to_tensor(rows), params).to(torch.float64).sum(dim=-1)
        np.testing.assert_allclose(sums.numpy(), 1.0, atol=2e-6)


LAST = 1.0 - 2.0**-53  # the largest number that `uniform` can return


def test_draw_picks_by_exact_intervals() -> None:
    weights = torch.tensor([0.25, 0.0, 0.5, 0.25])  # intervals [0, 1/4), none, [1/4, 3/4), [3/4, 1)
    below = np.nextafter
    for u, index in (
        (0.0, 0),
        (below(0.25, 0), 0),
        (0.25, 2),
        (below(0.75, 0), 2),
        (0.75, 3),
        (LAST, 3),
    ):
        assert draw(weights, float(u)) == index, u


def test_draw_needs_no_normalisation() -> None:
    weights = torch.tensor([1.0, 2.0, 5.0]) * 1e-20
    assert [draw(weights, u) for u in (0.0, 0.12, 0.13, 0.37, 0.38, LAST)] == [0, 0, 1, 1, 2, 2]


def test_draw_never_picks_what_has_no_weight() -> None:
    weights = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0])
    assert draw(weights, 0.0) == 2
    assert draw(weights, LAST) == 4
    assert draw(torch.tensor([0.0, 3e-45, 0.0]), LAST) == 1


def test_where_nothing_can_be_drawn_that_is_an_error_and_not_some_token() -> None:
    """Every token banned, or a model that answers with NaN."""
    banned = SamplingParams(banned_token_ids=(0, 1, 2))
    for weights in (
        torch.zeros(3),
        torch.tensor([0.5, torch.nan, 0.5]),
        law(adjusted_logits(torch.zeros(1, 3), banned, [0], prompt_length=1), banned)[0],
    ):
        with pytest.raises(ValueError, match="draw"):
            draw(weights, 0.5)


@SEEDED
@given(
    weights=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8).filter(lambda values: sum(values) > 0),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from((0.0, LAST))),
)
@example(weights=[1.0, 1.401298464324817e-45], u=LAST)
def test_draw_agrees_with_a_walk_along_the_weights(weights: list[float], u: float) -> None:
    running = list(itertools.accumulate(weights))
    point = u * running[-1]
    expected = next((i for i, end in enumerate(running) if end > point), None)
    index = draw(torch.tensor(weights, dtype=torch.float32), u)
    assert weights[index] > 0
    assert expected is None or index == expected


def test_draw_keeps_float64_precision_over_a_real_vocabulary() -> None:
    """With 49,152 equal weights the u in the middle of interval i picks i, for every i tried."""
    weights = torch.full((49_152,), 1.0 / 49_152)
    for index in (0, 1, 777, 24_576, 49_150, 49_151):
        assert draw(weights, (index + 0.5) / 49_152) == index
