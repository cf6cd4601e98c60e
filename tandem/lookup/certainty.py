"""How likely guesses are to stand: by kind, from what has become of earlier ones.

A kind is whatever its drafter can tell guesses apart by. What is counted are tokens that have come, never the draws of
those to come, so that drafts stay as exact as they are (docs/exactness.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

_PRIOR_WEIGHT = 4.0  # guesses that what is taken for granted counts as
# How many of its own a text needs to count as much as all others together. Between 3 and infinity the replayed speed
# of bundled answers differs by 1 %; texts at other temperatures differ by more.
_SHARED_WEIGHT = 12.0
_SHARED_DECAY, _OWN_DECAY = 0.999, 0.97  # a guess: half is forgotten after 700, and after 23


@dataclass(slots=True)
class _Tally:
    tried: float = 0.0
    right: float = 0.0

    def add(self, *, right: bool, decay: float) -> None:
        self.tried = self.tried * decay + 1.0
        self.right = self.right * decay + right


def _tallies() -> defaultdict[Hashable, _Tally]:
    return defaultdict(_Tally)


@dataclass(frozen=True, slots=True)
class Experience:
    """What has become of all texts' guesses. One for a drafter; kinds are few, so it is bounded."""

    tallies: defaultdict[Hashable, _Tally] = field(default_factory=_tallies)


class Certainty:
    """For one text, leaning on what all texts have seen where it has seen little."""

    def __init__(self, experience: Experience) -> None:
        self._shared = experience.tallies
        self._own = _tallies()

    def of(self, kind: Hashable, *, expected: float) -> float:
        """The probability that a guess of this `kind` stands if those before it do. `expected`: where nothing is
        known."""
        shared, own = self._shared[kind], self._own[kind]
        common = (shared.right + _PRIOR_WEIGHT * expected) / (shared.tried + _PRIOR_WEIGHT)
        return (own.right + _SHARED_WEIGHT * common) / (own.tried + _SHARED_WEIGHT)

    def learn(self, kind: Hashable, *, right: bool) -> None:
        """A token has come in the place of a guess of this kind."""
        self._own[kind].add(right=right, decay=_OWN_DECAY)
        self._shared[kind].add(right=right, decay=_SHARED_DECAY)
