"""How long a service takes for its answers, and from when on it is late."""

from __future__ import annotations

# Of TCP's retransmission timer (RFC 6298): a new sample's weight in the mean and in the mean deviation.
_MEAN_STEP, _DEVIATION_STEP = 1 / 8, 1 / 4
# An answer is late after so many times what is usual: load doubles times in a moment, faults do not end.
_GENEROSITY = 8.0
_FLOOR_SHARE = 0.1  # of the longest wait: an answer is never late before


class Pace:
    """A running mean and deviation of answers' times. An answer may be of several units, which take as long each."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._deviation = 0.0
        self._known = False

    @property
    def mean_seconds(self) -> float:
        """Of one unit; 0 while nothing is known."""
        return self._mean

    def observe(self, seconds: float, *, units: int = 1) -> None:
        """An answer took so long."""
        value = seconds / units
        if not self._known:
            self._mean, self._deviation, self._known = value, value / 2, True
            return
        self._deviation += _DEVIATION_STEP * (abs(value - self._mean) - self._deviation)
        self._mean += _MEAN_STEP * (value - self._mean)

    def late_after(self, most_seconds: float, *, units: int = 1) -> float:
        """From when on an answer is late: at most `most_seconds`, at least a tenth of it; that itself while nothing is
        known."""
        if not self._known:
            return most_seconds
        usual = (self._mean + self._deviation) * units
        return min(most_seconds, max(_FLOOR_SHARE * most_seconds, _GENEROSITY * usual))
