"""How many tokens to draft (k): what the request says, or, under "auto", what pays by what has been measured.

With s_j the probability that a round in which k >= j were asked for brings an accepted j-th drafted token, d_j that it
brings a j-th drafted token at all (n-grams have no guess, or a short one), and t(n) the time of a target's forward with
n drafted tokens at the present load (the target foretells it),

    tokens of a round     E(k) = 1 + s_1 + ... + s_k              (tandem/speedup.py has the sources)
    its time              C(k) = wait + t(0) + sum of d_j * (t(j) - t(j - 1) + draft), j = 1 ... k

where `draft` is the drafter's time for a token and `wait` the round trip to it. k = 0 costs t(0) alone. The k with the
largest E(k) / C(k) is chosen. All of it depends on rounds that are over, never on the draws of the one to come, so the
law of the output is untouched.

That is k on average. How likely this very draft is to stand, its drafter knows better, so it is told the price of each
token: without the j-th one the forward would be t(j) - t(j - 1) + draft shorter, in which so many tokens would have
come otherwise. A token that is less likely to stand than this is not worth its time. (Of a fraction E / C the best k
and the price are one thing: E(k) - rate * C(k) is largest, Dinkelbach 1967.) An engine that fills steps up to a few
sizes makes t a staircase. The tokens of a stair share what it costs to step on it: t is replaced by its lower convex
hull, with which a drafter that goes on while a token is worth its price does right without looking ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.speculate import Round, SpeculationPlan
from tandem.speedup import expected_tokens, serial_seconds
from tandem.types import DraftlessReason, DraftWish

_HOPE = 0.7  # acceptance where nothing is known: hopeful, so that it is tried
_HOPE_WEIGHT = 2.0  # in rounds
_SHARED_WEIGHT = 8.0  # how many rounds of its own an answer needs to count as much as all others together
_SHARED_DECAY, _OWN_DECAY = 0.995, 0.95  # of what was counted, a round: half is forgotten after 140, and after 14
_FIRST_PROBE, _LAST_PROBE, _PROBE_LENGTH = 8, 64, 3  # while k is 0: rounds to the next try, doubling; k of a try
_TRIED_LONGER = 64  # one in so many rounds is chosen as if drafted tokens made no forward longer
_AVERAGE_STEP = 0.05  # how much one round's times count
_UNTIL_KNOWN = 5  # k where the target's times are not known
# Gains over plain decoding that are asked for. 2 % are within the error of what is measured. In company a draft also
# makes others wait, who share the next forward, and takes the cores that a step is computed on.
_LEAST_GAIN, _LEAST_GAIN_PER_OTHER = 0.02, 0.01
# Of a token behind the first, where forwards seem to take no longer for it: certainties of several tokens in a row are
# somewhat too high. With 0.05, one greedy stream is 3 % slower.
_LEAST_PRICE = 0.1


@dataclass(slots=True)
class Counts:
    """By position: how often it was reached and asked for, and how often that brought a token. Decayed.

    Of *drafted* tokens (reached: one was drafted before it) and of *accepted* ones (reached: the one before it was
    accepted), so that what a rejection hides is not counted against the positions behind it.
    """

    most: int
    draft_asked: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    accept_asked: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draft_asked, self.drafted = [0.0] * self.most, [0.0] * self.most
        self.accept_asked, self.accepted = [0.0] * self.most, [0.0] * self.most

    def add(self, num_asked: int, num_drafted: int, num_accepted: int, *, decay: float) -> None:
        for asked, got, length in (
            (self.draft_asked, self.drafted, num_drafted),
            (self.accept_asked, self.accepted, num_accepted),
        ):
            for j in range(min(num_asked, length + 1, self.most)):
                asked[j] = asked[j] * decay + 1.0
                got[j] = got[j] * decay + (j < length)


@dataclass(slots=True)
class Experience:
    """What one drafter has been worth so far, over all requests."""

    counts: Counts
    token_seconds: float = 0.0  # its time for one token
    wait_seconds: float = 0.0  # the rest of the time that a draft is waited for
    num_chosen: int = 0  # rounds with drafts of a chosen length

    def add(self, num_asked: int, outcome: Round) -> None:
        self.counts.add(num_asked, outcome.num_drafted, outcome.num_accepted, decay=_SHARED_DECAY)
        waited = max(0.0, outcome.draft_seconds - outcome.draft_service_seconds)
        self.wait_seconds = _follow(self.wait_seconds, waited)
        if outcome.num_drafted:
            self.token_seconds = _follow(self.token_seconds, outcome.draft_service_seconds / outcome.num_drafted)


def _follow(average: float, value: float) -> float:
    """A running average with `value` in it; 0: there is none yet."""
    return value if average == 0.0 else average + _AVERAGE_STEP * (value - average)


def estimate(own: Counts, shared: Counts) -> tuple[list[float], list[float]]:
    """(s_j, d_j) for every position: what this answer has seen, leaning on what all have where it has seen little."""
    return (
        _going_on(own.accepted, own.accept_asked, shared.accepted, shared.accept_asked, hope=_HOPE),
        _going_on(own.drafted, own.draft_asked, shared.drafted, shared.draft_asked, hope=1.0),
    )


def _going_on(
    own: Sequence[float],
    own_asked: Sequence[float],
    shared: Sequence[float],
    shared_asked: Sequence[float],
    hope: float,
) -> list[float]:
    """The probability of getting as far as each position: the product of those of every step up to it.

    Where little is known of a step, it is taken to be like the one before; of the second, like `hope`.
    """
    reached = 1.0
    result: list[float] = []
    for j, (mine, my_tries, all_, all_tries) in enumerate(zip(own, own_asked, shared, shared_asked, strict=True)):
        common = (all_ + _HOPE_WEIGHT * hope) / (all_tries + _HOPE_WEIGHT)
        weight = min(_SHARED_WEIGHT, all_tries + _HOPE_WEIGHT)
        step = (mine + weight * common) / (my_tries + weight)
        reached *= step
        result.append(reached)
        # Whether there is a guess at all says nothing of how long it holds.
        hope = hope if j == 0 else step
    return result


def best_length(
    *,
    accepted: Sequence[float],
    drafted: Sequence[float],
    round_seconds: Sequence[float],
    token_seconds: float,
    wait_seconds: float,
    num_sequences: int,
) -> tuple[int, float]:
    """The k from 0 to len(accepted) with the most tokens a second, and these; see this module's formula.

    `round_seconds[n]` are t(0), t(1), ...; beyond them t is a straight line. There must be two at least.
    `num_sequences` share the target's forward.
    """
    plain_rate = 1.0 / round_seconds[0]
    best, best_rate = 0, plain_rate * (1.0 + _LEAST_GAIN + _LEAST_GAIN_PER_OTHER * (num_sequences - 1))
    verify = draft = 0.0
    for k, (tokens, d) in enumerate(zip(expected_tokens(accepted)[1:], drafted, strict=True), start=1):
        verify += d * added_seconds(round_seconds, k)
        draft += d * token_seconds
        seconds = serial_seconds(verify=round_seconds[0] + verify, draft=draft, wait=wait_seconds)
        if tokens / seconds > best_rate:
            best, best_rate = k, tokens / seconds
    return best, best_rate if best else plain_rate


def added_seconds(round_seconds: Sequence[float], k: int) -> float:
    """What a k-th drafted token makes the target's forward longer. Beyond what it foretells: as much as the average."""
    last = len(round_seconds) - 1
    if k > last:
        return (round_seconds[last] - round_seconds[0]) / last
    return round_seconds[k] - round_seconds[k - 1]


def hull_slopes(values: Sequence[float]) -> list[float]:
    """How much the lower convex hull of values[0], values[1], ... grows at each step: never less than before."""
    slopes: list[float] = []
    at = 0
    while at < len(values) - 1:
        slope, end = min(((values[j] - values[at]) / (j - at), -j) for j in range(at + 1, len(values)))
        slopes += [slope] * (-end - at)
        at = -end
    return slopes


class AutoLength:
    """Chooses k for the rounds of one answer, and learns from each, for this answer and for all."""

    def __init__(self, experience: Experience, *, most: int) -> None:
        self._shared = experience
        self._own = Counts(most)
        self._round_seconds: tuple[float, ...] = ()
        self._num_sequences = 1
        self._asked = DraftWish(0)
        self._rounds_without = 0
        self._probe_after = _FIRST_PROBE

    def next(self) -> DraftWish:
        self._asked = self._choose()
        return self._asked

    def learn(self, outcome: Round) -> None:
        self._round_seconds = outcome.verify_times.round_seconds
        self._num_sequences = outcome.verify_times.num_sequences
        if outcome.num_drafted or outcome.draftless_reason is DraftlessReason.EMPTY:
            self._own.add(self._asked.num_draft_tokens, outcome.num_drafted, outcome.num_accepted, decay=_OWN_DECAY)
            self._shared.add(self._asked.num_draft_tokens, outcome)

    def _choose(self) -> DraftWish:
        if len(self._round_seconds) < 2:
            return DraftWish(min(_UNTIL_KNOWN, self._own.most))  # this target does not foretell its times
        times = self._round_seconds
        k, tokens_per_second = self._best(times)
        if k > 0:
            self._rounds_without, self._probe_after = 0, _FIRST_PROBE
            self._shared.num_chosen += 1
            if self._shared.num_chosen % _TRIED_LONGER == 0:  # a time that looks bad would never be measured again
                times = times[:1] * len(times)
                k, tokens_per_second = self._best(times)
            return self._wish(k, tokens_per_second, times)
        self._rounds_without += 1
        if self._rounds_without < self._probe_after:
            return DraftWish(0)
        self._rounds_without, self._probe_after = 0, min(2 * self._probe_after, _LAST_PROBE)
        return self._wish(min(_PROBE_LENGTH, self._own.most), tokens_per_second, times)

    def _best(self, round_seconds: Sequence[float]) -> tuple[int, float]:
        accepted, drafted = estimate(self._own, self._shared.counts)
        return best_length(
            accepted=accepted,
            drafted=drafted,
            round_seconds=round_seconds,
            token_seconds=self._shared.token_seconds,
            wait_seconds=self._shared.wait_seconds,
            num_sequences=self._num_sequences,
        )

    def _wish(self, k: int, tokens_per_second: float, round_seconds: Sequence[float]) -> DraftWish:
        prices: list[float] = []
        for seconds in hull_slopes(round_seconds)[:k]:
            price = (seconds + self._shared.token_seconds) * tokens_per_second
            prices.append(min(1.0, max(_LEAST_PRICE if prices else 0.0, price)))
        return DraftWish(k, tuple(prices))


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The request's own k."""

    num_draft_tokens: int

    def next(self) -> DraftWish:
        return DraftWish(self.num_draft_tokens)

    def learn(self, outcome: Round) -> None:
        """Nothing: the request has decided."""


class DraftLengths:
    """Makes an answer's DraftLength, and keeps what its drafter has been worth. One for the process."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._experience: dict[tuple[str, bool], Experience] = {}

    def start(self, plan: SpeculationPlan, *, greedy: bool) -> AutoLength | FixedLength:
        """For one answer; greedy ones and sampled ones are foretold differently well. Drafters are few: their names
        were checked when the request came in."""
        if not plan.automatic:
            return FixedLength(plan.num_draft_tokens)
        experience = self._experience.setdefault((plan.drafter, greedy), Experience(Counts(self._most)))
        return AutoLength(experience, most=plan.num_draft_tokens)
