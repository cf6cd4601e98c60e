"""How long a step waits for company.

Texts that shared a forward ask for the next one at nearly the same time: a millisecond or two later, when their answers
have been to the gateway and back. A worker that started with the first of them would run batches of one and of seven in
turn, and eight streams would take 44 ms a token instead of 28.
"""

from __future__ import annotations

_SHARE = 0.25  # of the last step's time, at most: eight answers take a gateway 5 ms, and a step of eight takes 28
_LONGEST_SECONDS = 0.010
_PAUSE = 16  # steps without waiting after nobody came


class Gathering:
    """Told of steps and arrivals; says how long to wait for more. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._expected = 0
        self._arrived = 0
        self._until = 0.0
        self._pause = 0

    def step_ended(self, now: float, *, seconds: float, num_answered: int) -> None:
        """A step has taken `seconds`; so many of its texts have their answers, and may be back soon."""
        if self._pause > 0:
            self._pause -= 1
        elif self._expected > 1 and self._arrived <= self._expected // 2:
            self._pause = _PAUSE  # these texts do not come back at once: they draft in between, or have ended
        self._expected = 0 if self._pause else num_answered
        self._arrived = 0
        self._until = now + min(_SHARE * seconds, _LONGEST_SECONDS)

    def arrived(self) -> None:
        """A text asks for its next tokens."""
        self._arrived += 1

    def left(self) -> None:
        """A text has ended."""
        self._expected -= 1

    def remaining_seconds(self, now: float) -> float:
        """How long to wait for the next arrival; 0: begin."""
        return max(0.0, self._until - now) if self._arrived < self._expected else 0.0
