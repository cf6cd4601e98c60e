"""How long a step waits for company.

Texts that shared a forward ask for the next one at nearly the same time: a few milliseconds later, when their answers
have been to the gateway and back, and to the draft in between. A worker that started with the first of them would run
batches of one and of seven in turn, and eight streams would take 44 ms a token instead of 28. And texts that were
parted once would stay so: each half would ask while the other's step runs, and find the worker free when that one's
answers are only just under way. So a step waits for the texts that have their answers from the last one, whoever else
is there. (With n-gram drafts, eight questions waited 4.6 ms for the other half's step, and 1.4 since.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_SHARE = 0.5  # of the last step's time, at most
_LONGEST_SECONDS = 0.010
_PAUSE = 16  # steps without waiting after half of the texts or more did not come


class Gathering:
    """Told of steps and arrivals; says how long to wait for more. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._expected: set[Hashable] = set()  # texts that have their answers from the last step, and have not ended
        self._missing: set[Hashable] = set()  # and of these, those that are not back
        self._until = 0.0
        self._pause = 0

    def step_ended(self, now: float, *, seconds: float, answered: Iterable[Hashable]) -> None:
        """A step has taken `seconds`; these of its texts have their answers, and may be back soon."""
        if self._pause > 0:
            self._pause -= 1
        elif self._expected and 2 * len(self._missing) >= len(self._expected):
            self._pause = _PAUSE  # these texts do not come back at once: they draft for long, or nobody reads them
        self._expected = set() if self._pause else set(answered)
        self._missing = set(self._expected)
        self._until = now + min(_SHARE * seconds, _LONGEST_SECONDS)

    def arrived(self, text: Hashable) -> None:
        """A text asks for its next tokens."""
        self._missing.discard(text)

    def left(self, text: Hashable) -> None:
        """A text has ended."""
        self._expected.discard(text)
        self._missing.discard(text)

    def remaining_seconds(self, now: float) -> float:
        """How long to wait for the next arrival; 0: begin."""
        return max(0.0, self._until - now) if self._missing else 0.0
