"""A circuit breaker: after a fault a service rests; then one tries it; if that works, all do."""

from __future__ import annotations

_FIRST_PAUSE_SECONDS = 0.5


class Breaker:
    """Closed: anybody may try the service. Open, after a fault: nobody, for a pause that doubles with every further
    one, up to `longest_seconds`; then one at a time, until one succeeds.

    Times are of any one monotonic clock, in seconds.
    """

    def __init__(self, *, longest_seconds: float) -> None:
        self._longest = longest_seconds
        self._pause = 0.0  # 0: closed
        self._retry_at = 0.0
        self._tried = False  # since the last fault

    def allows(self, now: float) -> bool:
        """Whether one more may try."""
        return self._pause == 0.0 or now >= self._retry_at

    def begin(self, now: float) -> None:
        """Somebody tries. While it is open, nobody else for as long as the pause, however the try ends."""
        if self._pause:
            self._tried = True
            self._retry_at = now + self._pause

    def fault(self, now: float) -> None:
        """A try failed; or, while it is open and nobody tries, somebody who was there before: that says nothing new."""
        if self._pause and not self._tried:
            return
        self._pause = min(2 * self._pause or _FIRST_PAUSE_SECONDS, self._longest)
        self._tried = False
        self._retry_at = now + self._pause

    def retry_at_once(self) -> None:
        """There are news of the service: it may be another process by now."""
        self._retry_at = 0.0

    def success(self) -> None:
        """A try succeeded: closed."""
        self._pause = 0.0
        self._tried = False
