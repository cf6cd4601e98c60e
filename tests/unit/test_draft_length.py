"""Choosing k: the formula against brute force, and a simulated service whose best fixed k is known in hindsight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.draft_length import AutoLength, DraftLengths, FixedLength, best_length, hull_slopes
from gateway.settings import Settings
from gateway.speculate import Round, SpeculationPlan
from tandem.types import DraftlessReason, DraftWish, ServiceTimes, TokenOrigin

MOST = 16
CPU = tuple(0.010 * (1.0 + 0.06 * k) for k in range(9))  # a small model on a CPU: 6 % a token
BUSY = tuple(0.030 * (1.0 + 0.4 * k) for k in range(9))  # eight streams of it: compute is the limit


def a_round(
    num_drafted: int,
    num_accepted: int,
    *,
    round_seconds: tuple[float, ...] = CPU,
    token_seconds: float = 0.0,
    wait_seconds: float = 0.0005,
) -> Round:
    return Round(
        token_ids=(1,) * (num_accepted + 1),
        origins=(TokenOrigin.PLAIN,) * (num_accepted + 1),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        draftless_reason=None if num_drafted else DraftlessReason.EMPTY,
        draft_seconds=num_drafted * token_seconds + wait_seconds,
        draft_service_seconds=num_drafted * token_seconds,
        verify_times=ServiceTimes(round_seconds=round_seconds),
    )


def seconds_at(round_seconds: tuple[float, ...], k: int) -> float:
    slope = round_seconds[-1] - round_seconds[-2]
    return round_seconds[k] if k < len(round_seconds) else round_seconds[-1] + slope * (k - len(round_seconds) + 1)


@given(data=st.data(), slope=st.floats(0.0, 0.02), token_seconds=st.floats(0.0, 0.01), wait=st.floats(0.0, 0.01))
def test_the_chosen_k_has_the_highest_rate(
    data: st.DataObject, slope: float, token_seconds: float, wait: float
) -> None:
    """Accepted and drafted by position fall, and a token must be drafted to be accepted."""
    drafted = sorted(data.draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=MOST)), reverse=True)
    accepted = [d * data.draw(st.floats(0.0, 1.0)) for d in drafted]
    times = tuple(0.01 + slope * k for k in range(9))

    def rate(k: int) -> float:
        num_drafted = sum(drafted[:k])
        return (1.0 + sum(accepted[:k])) / (0.01 + slope * num_drafted + num_drafted * token_seconds + wait)

    k, tokens_per_second = best_length(
        accepted=accepted,
        drafted=drafted,
        round_seconds=times,
        token_seconds=token_seconds,
        wait_seconds=wait,
        num_sequences=1,
    )
    plain = 1.02 / times[0]  # 2 % are asked for, see _LEAST_GAIN
    rates = [rate(j) for j in range(1, len(drafted) + 1)]
    if k == 0:
        assert max(rates) <= plain * (1.0 + 1e-9)
        assert tokens_per_second == pytest.approx(1.0 / times[0])
    else:
        assert rates[k - 1] == pytest.approx(max(rates)) == tokens_per_second
        assert rates[k - 1] >= plain * (1.0 - 1e-9)


def chosen(round_seconds: tuple[float, ...], *, acceptance: float, token_seconds: float = 0.0) -> DraftWish:
    """The wish after many rounds in which each drafted token was accepted with that probability."""
    rng = np.random.default_rng(2)
    length = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
    length.learn(a_round(0, 0, round_seconds=round_seconds))
    for _ in range(300):
        k = length.next().num_draft_tokens
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        if k:
            length.learn(a_round(k, accepted, round_seconds=round_seconds, token_seconds=token_seconds))
    return length.next()


def test_the_price_of_a_token() -> None:
    wish = chosen(CPU, acceptance=0.6)
    # 0.6 ms more a token, at the 2.3 tokens that come in the 12.4 ms of a round with four drafted tokens.
    assert wish.num_draft_tokens in {3, 4}
    assert list(wish.least_certainties) == [pytest.approx(0.6 * 2.25 / 12.6, rel=0.15)] * wish.num_draft_tokens
    dearer = chosen(CPU, acceptance=0.6, token_seconds=0.001)
    assert dearer.least_certainties[0] > 2 * wish.least_certainties[0]
    # Eight streams, given up: 12 ms more for a token of each, in which they get 0.4 of one otherwise.
    length = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
    play(length, acceptance=0.02, hit_rate=1.0, round_seconds=BUSY, num_tokens=300)
    probes = [wish for wish in (length.next() for _ in range(100)) if wish.num_draft_tokens]
    assert all(price == pytest.approx(0.4) for wish in probes for price in wish.least_certainties)


def test_where_steps_are_filled_up_a_draft_goes_to_the_end_of_the_stair() -> None:
    """Steps of 1, 5 and 9 tokens: nothing is saved by one token less than 4, and 5 cost as much as 8. Those of a stair
    share what it costs."""
    stairs = (0.0120, *[0.0180] * 4, *[0.0240] * 4)
    for acceptance, tokens in ((0.5, 1.94), (0.6, 2.3)):  # a round
        wish = chosen(stairs, acceptance=acceptance)
        price = 0.006 / 4 * tokens / 0.018
        assert wish.num_draft_tokens == 4
        assert list(wish.least_certainties) == [pytest.approx(price, rel=0.25)] * 4
    assert chosen(stairs, acceptance=0.95).num_draft_tokens >= 8


def test_a_first_token_that_costs_nothing_has_no_price_whatever_those_behind_it_cost() -> None:
    """Where lone tokens are computed in pairs, the first drafted one is free, with eight streams too."""
    wish = chosen((0.0122, 0.0122, 0.0148, 0.0174, 0.0197, 0.0220), acceptance=0.6)
    assert wish.least_certainties[0] == 0.0
    assert all(price > 0.2 for price in wish.least_certainties[1:])
    assert len(wish.least_certainties) == wish.num_draft_tokens


def test_a_time_that_once_seemed_bad_is_measured_again() -> None:
    """A hiccup at start-up made larger steps look far too slow, and one token was drafted for ever."""
    wrong, right = ((0.010, *(0.010 + slope * j for j in range(16))) for slope in (0.008, 0.0003))
    lengths = DraftLengths(most=MOST)
    rng = np.random.default_rng(3)
    times, asked = wrong, list[int]()
    for _ in range(40):  # answers
        length = lengths.start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
        length.learn(a_round(0, 0, round_seconds=times))
        for _ in range(30):
            k = length.next().num_draft_tokens
            asked.append(k)
            if k > 1:  # the target measures the step
                times = tuple(seen + 0.3 * (true - seen) for seen, true in zip(times, right, strict=True))
            length.learn(a_round(k, accepted_of(rng, k, 0.7), round_seconds=times))
    assert set(asked[20:60]) == {1}
    assert min(asked[-100:]) > 2


def accepted_of(rng: np.random.Generator, k: int, acceptance: float) -> int:
    return next((j for j in range(k) if rng.random() >= acceptance), k)


@pytest.mark.parametrize(
    ("values", "slopes"),
    [
        ((1.0,), []),
        ((1.0, 2.0, 4.0), [1.0, 2.0]),
        ((1.0, 4.0, 5.0), [2.0, 2.0]),
        ((1.0, 3.0, 3.0, 3.0, 6.0, 6.0), [2 / 3] * 3 + [1.5] * 2),
        ((2.0, 2.0, 1.0), [-0.5, -0.5]),  # times are measured, and may fall
    ],
)
def test_the_lower_convex_hull_by_hand(values: tuple[float, ...], slopes: list[float]) -> None:
    assert hull_slopes(values) == pytest.approx(slopes)


def test_a_drafter_that_knows_the_price_and_its_chances_is_faster() -> None:
    """Half of the guesses are right in 9 of 10 cases, the others in 1 of 20, and the drafter can tell which."""

    def speed(*, tells_price: bool, round_seconds: tuple[float, ...]) -> float:
        rng = np.random.default_rng(1)
        length = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
        tokens, seconds = 0, 0.0
        while tokens < 5000:
            wish = length.next()
            drafted = accepted = 0
            stands, all_stand = True, 1.0
            while drafted < wish.num_draft_tokens:
                chance = 0.9 if rng.random() < 0.5 else 0.05
                all_stand *= chance
                prices = wish.least_certainties if tells_price and wish.least_certainties else (0.0,)
                if all_stand < prices[min(drafted, len(prices) - 1)]:
                    break
                drafted += 1
                stands = stands and rng.random() < chance
                accepted += stands
            tokens += accepted + 1
            seconds += seconds_at(round_seconds, drafted) + (0.0005 if wish.num_draft_tokens else 0.0)
            if wish.num_draft_tokens:
                length.learn(a_round(drafted, accepted, round_seconds=round_seconds))
        return tokens / seconds

    for times, least_gain in ((CPU, 1.05), (BUSY, 1.2)):
        blind, knowing = (speed(tells_price=tells, round_seconds=times) for tells in (False, True))
        assert knowing > least_gain * blind


def play(
    length: AutoLength | FixedLength,
    *,
    acceptance: float,
    hit_rate: float,
    round_seconds: tuple[float, ...],
    num_tokens: int = 3000,
    token_seconds: float = 0.0,
    wait_seconds: float = 0.0005,
) -> float:
    """Tokens a second of a simulated answer."""
    rng = np.random.default_rng(1)
    tokens, seconds = 0, 0.0
    while tokens < num_tokens:
        k = length.next().num_draft_tokens
        has_guess = rng.random() < hit_rate
        drafted = k if has_guess else 0
        accepted = accepted_of(rng, drafted, acceptance)
        tokens += accepted + 1
        seconds += seconds_at(round_seconds, drafted) + drafted * token_seconds + (wait_seconds if k else 0.0)
        if k:
            length.learn(
                a_round(
                    drafted,
                    accepted,
                    round_seconds=round_seconds,
                    token_seconds=token_seconds,
                    wait_seconds=wait_seconds,
                )
            )
    return tokens / seconds


@pytest.mark.parametrize("round_seconds", [CPU, BUSY], ids=["idle", "busy"])
@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("hit_rate", [0.2, 1.0])
@pytest.mark.parametrize("token_seconds", [0.0, 0.002])
def test_it_is_as_good_as_the_best_fixed_k_in_hindsight(
    round_seconds: tuple[float, ...], acceptance: float, hit_rate: float, token_seconds: float
) -> None:
    def speed(length: AutoLength | FixedLength) -> float:
        return play(
            length,
            acceptance=acceptance,
            hit_rate=hit_rate,
            round_seconds=round_seconds,
            token_seconds=token_seconds,
        )

    auto = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
    best_fixed = max(speed(FixedLength(k)) for k in range(MOST + 1))
    assert speed(auto) > 0.92 * best_fixed  # the rounds in which it learns included


def test_it_gives_up_what_does_not_pay_and_comes_back_when_it_does() -> None:
    length = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
    play(length, acceptance=0.02, hit_rate=1.0, round_seconds=BUSY, num_tokens=300)
    asked = [length.next().num_draft_tokens for _ in range(256)]
    assert set(asked) == {0, 3}  # tries it now and then
    assert 4 <= asked.count(3) <= 6
    for _ in range(400):
        k = length.next().num_draft_tokens
        if k:
            length.learn(a_round(k, k))
    assert length.next().num_draft_tokens > 4


def test_what_one_answer_has_learnt_the_next_one_knows() -> None:
    lengths = DraftLengths(most=MOST)
    plan = SpeculationPlan(num_draft_tokens=MOST, automatic=True)
    old = lengths.start(plan, greedy=True)
    for _ in range(200):
        k = old.next().num_draft_tokens
        old.learn(a_round(k, 0))
    fresh = lengths.start(plan, greedy=True)
    fresh.learn(a_round(0, 0))
    assert fresh.next().num_draft_tokens == 0
    other = lengths.start(SpeculationPlan(num_draft_tokens=MOST, drafter="model", automatic=True), greedy=True)
    other.learn(a_round(0, 0))
    assert other.next().num_draft_tokens > 0  # another drafter is another matter


def test_without_foretold_times_it_drafts_five() -> None:
    length = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
    assert length.next().num_draft_tokens == 5
    length.learn(a_round(5, 5, round_seconds=()))
    assert length.next().num_draft_tokens == 5
    short = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=3, automatic=True), greedy=True)
    assert short.next().num_draft_tokens == 3


def test_company_wants_a_larger_gain() -> None:
    def choose(num_sequences: int) -> int:
        return best_length(
            accepted=[0.4],
            drafted=[1.0],
            round_seconds=[0.03, 0.04],
            token_seconds=0.0,
            wait_seconds=0.0,
            num_sequences=num_sequences,
        )[0]

    assert choose(1) == 1  # 1.4 tokens in 4/3 of the time: 5 % more
    assert choose(8) == 0


def test_a_drafter_that_limits_itself_costs_no_more_than_it_drafts() -> None:
    """N-grams: half of the rounds have a guess of one token, which holds; a long k must not be priced in full."""
    lengths = DraftLengths(most=MOST)
    length = lengths.start(SpeculationPlan(num_draft_tokens=MOST, automatic=True), greedy=True)
    length.learn(a_round(0, 0, round_seconds=BUSY))
    for turn in range(200):
        length.next()
        length.learn(a_round(turn % 2, turn % 2, round_seconds=BUSY))
    assert length.next().num_draft_tokens > 0


def test_a_request_s_own_k_stays() -> None:
    length = DraftLengths(most=MOST).start(SpeculationPlan(num_draft_tokens=7), greedy=True)
    length.learn(a_round(7, 0))
    assert length.next().num_draft_tokens == 7


def test_rounds_without_an_answer_of_the_draft_teach_nothing() -> None:
    """A draft that is down says nothing of what its drafts are worth."""
    lengths = DraftLengths(most=MOST)
    plan = SpeculationPlan(num_draft_tokens=MOST, automatic=True)
    length = lengths.start(plan, greedy=True)
    down = Round(
        token_ids=(1,),
        origins=(TokenOrigin.PLAIN,),
        num_drafted=0,
        num_accepted=0,
        draftless_reason=DraftlessReason.DOWN,
        verify_times=ServiceTimes(round_seconds=CPU),
    )
    length.next()
    length.learn(a_round(4, 2))
    expected = length.next().num_draft_tokens
    for _ in range(100):
        length.learn(down)
    assert length.next().num_draft_tokens == expected > 0


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("token_seconds", [0.0, 0.002])
def test_speculation_narrows_before_requests_queue(acceptance: float, token_seconds: float) -> None:
    """More and more answers share a forward whose time grows as that of the bundled target on two cores does: 9.8 ms
    for a token, 14 for nine, then 1.3 each. k falls from one answer to the next lot, and nothing is drafted any more
    when as many run as may (32, gateway/settings.py): only then do requests wait for a place."""

    def forward_seconds(num_tokens: int) -> float:
        return max(0.0093 + 0.0005 * num_tokens, 0.0013 * num_tokens)

    def chosen(num_sequences: int) -> int:
        return best_length(
            accepted=[acceptance**j for j in range(1, MOST + 1)],
            drafted=[1.0] * MOST,
            round_seconds=[forward_seconds(num_sequences * (1 + k)) for k in range(MOST + 1)],
            token_seconds=token_seconds,
            wait_seconds=0.0005,
            num_sequences=num_sequences,
        )[0]

    lengths = [chosen(number) for number in (1, 2, 4, 8, 16, Settings().max_concurrent_requests)]
    assert lengths == sorted(lengths, reverse=True), lengths
    assert lengths[0] >= 1
    assert lengths[-1] == 0
