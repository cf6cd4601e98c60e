"""What a verification may say, and which of that is worth preparing for. Pure.

An outcome is the number of accepted tokens and the token that the target adds: one in place of the first rejected
(recovered), or behind all (bonus). With A_j the probability that the first j drafted tokens are accepted, by what this
text has seen, and q_j the draft's own law behind them, an outcome is taken to be as likely as

    P(j, t) = A_j * q_j(t)          for t other than the drafted token j + 1

as if the target's token were drawn from the draft's law.

Whether (j, t) is prepared for depends on the first j drafted tokens and on nothing behind them. If it comes, all of
that is part of the text, so that a draft's being ready says nothing of numbers that are yet to decide on tokens. It
matters where k is chosen by how long drafts take (docs/exactness.md), and is why outcomes are not simply sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.drafting import Guess

_HOPE, _HOPE_WEIGHT = 0.7, 2.0  # acceptance where nothing is known, and for how many tokens that counts
_DECAY = 0.95  # of what was counted, a round: half is forgotten after 14
_LEAST_LIKELY = 0.05  # an outcome that comes less often is not worth its place in a forward


@dataclass(frozen=True, slots=True)
class Outcome:
    """The first `num_accepted` drafted tokens stand, then comes `token_id`."""

    num_accepted: int
    token_id: int


@dataclass(slots=True)
class Acceptance:
    """By position: how often a drafted token was tested there, and accepted. Decayed."""

    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """One round is over."""
        missing = num_drafted - len(self.tested)
        self.tested += [0.0] * missing
        self.accepted += [0.0] * missing
        for position in range(min(num_drafted, num_accepted + 1)):
            self.tested[position] = self.tested[position] * _DECAY + 1.0
            self.accepted[position] = self.accepted[position] * _DECAY + (position < num_accepted)

    def reached(self, num_drafted: int) -> list[float]:
        """A_0 = 1, A_1, ... up to A_num_drafted. Where little is known of a position, it is as the one before."""
        reached, rate = [1.0], _HOPE
        for position in range(num_drafted):
            tested, accepted = (
                (self.tested[position], self.accepted[position]) if position < len(self.tested) else (0.0, 0.0)
            )
            rate = (accepted + _HOPE_WEIGHT * rate) / (tested + _HOPE_WEIGHT)
            reached.append(reached[-1] * rate)
        return reached


def recoveries(
    drafted: Sequence[int], guesses: Sequence[Sequence[Guess]], reached: Sequence[float], *, most: int
) -> list[Outcome]:
    """At most `most` likely outcomes in which a drafted token is rejected, by position.

    `guesses[j]`, likeliest first, are what the draft thinks of the position of `drafted[j]`; `reached` as
    `Acceptance.reached` has it.
    """
    outcomes = [
        Outcome(j, token_id)
        for j, (token, few) in enumerate(zip(drafted, guesses, strict=True))
        for token_id, probability in few
        if token_id != token and reached[j] * probability >= _LEAST_LIKELY
    ]
    return outcomes[:most]


def bonuses(num_drafted: int, guesses: Sequence[Guess], reached: Sequence[float], *, most: int) -> list[Outcome]:
    """At most `most` likely outcomes in which all are accepted. `guesses` are what the draft thinks comes then."""
    return [
        Outcome(num_drafted, token_id)
        for token_id, probability in guesses[:most]
        if reached[num_drafted] * probability >= _LEAST_LIKELY
    ]
