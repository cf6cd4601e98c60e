"""What a smaller k would have made of rounds that were drafted with a larger one. Pure.

By position alone this is not to be had: acceptance comes in bursts. Where an answer copies its prompt, one round with
k = 16 takes 16 tokens, and k = 4 would have had three rounds or four of its own there, all accepted. Of rounds with the
larger k such places are too small a part.

So the rounds are gone through in order. A drafter that looks at the text alone makes the same guesses where a shorter
round begins in the middle of a longer one that was accepted so far; both end at the same rejection, so they are in step
again after it. Two things are not known. Of a round that was accepted up to its k: whether its draft
would have gone on; it is taken to have done so if the next round's first token was accepted. Of one that the drafter
itself ended: whether from its middle on it would have ended later; it is taken to end where it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round after the prefill: `accepted` of `drafted` tokens. It brought accepted + 1 tokens."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """By position in the draft, from the first: in what part of the rounds a token was drafted, and accepted."""

    drafted: tuple[float, ...]
    accepted: tuple[float, ...]


def replay(outcomes: Sequence[Outcome], *, asked: int, k: int) -> list[Outcome]:
    """The rounds with k, of those with `asked`: as many tokens, in more rounds. k from 1 to `asked`."""
    if not 1 <= k <= asked:
        raise ValueError(f"k must be from 1 to {asked}, which was measured, got {k}")
    return [outcome for chain in _chains(outcomes, asked) for outcome in _cut(chain, k)]


def within(outcomes: Sequence[Outcome], *, num_tokens: int) -> list[Outcome]:
    """The rounds without what the last one brought beyond the answer's end, of whose tokens `num_tokens` are theirs."""
    kept: list[Outcome] = []
    left = num_tokens
    for outcome in outcomes:
        if left <= 0:
            break
        kept.append(Outcome(outcome.drafted, min(outcome.accepted, left - 1)))
        left -= outcome.accepted + 1
    return kept


def num_tokens(outcomes: Iterable[Outcome]) -> int:
    """What they brought together."""
    return sum(outcome.accepted + 1 for outcome in outcomes)


def positions(outcomes: Sequence[Outcome], *, asked: int) -> Positions:
    """Shares of rounds, all of which were asked for `asked` tokens. Of no rounds: all zero."""
    count = max(1, len(outcomes))
    return Positions(
        drafted=tuple(sum(each.drafted >= j for each in outcomes) / count for j in range(1, asked + 1)),
        accepted=tuple(sum(each.accepted >= j for each in outcomes) / count for j in range(1, asked + 1)),
    )


def _chains(outcomes: Sequence[Outcome], asked: int) -> Iterator[Outcome]:
    """Rounds that k alone has parted, as one: the bonus token between them counts as drafted and accepted.

    A draft that k ended could have gone on, so it has no end here; one that the drafter ended has.
    """
    chain: Outcome | None = None
    for outcome in outcomes:
        before = 0
        if chain is not None and outcome.accepted:
            before = chain.accepted + 1
        elif chain is not None:
            yield chain
        accepted = before + outcome.accepted
        drafted = accepted + asked if outcome.drafted == asked else before + outcome.drafted
        chain = Outcome(drafted, accepted)
        if outcome.accepted < asked:  # rejected, or ended by the drafter
            yield chain
            chain = None
    if chain is not None:
        yield chain


def _cut(chain: Outcome, k: int) -> Iterator[Outcome]:
    position = 0
    while position <= chain.accepted:
        accepted = min(k, chain.accepted - position)
        yield Outcome(min(k, chain.drafted - position), accepted)
        position += accepted + 1
