"""Stop strings in a text that arrives in pieces.

No character of a stop string is ever released, and nothing is held back that cannot be the beginning of one. Each
stop string is followed by its Knuth-Morris-Pratt automaton, whose state is the length of its longest prefix that the
text so far ends with: that many characters must wait, and the match is complete when the state is the whole string.
As the text is taken character by character, how it was cut into pieces changes nothing. The first match to complete
wins; of several that complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Follows one answer's text. After a match it must not be fed again."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        """`include_stop` leaves the stop string at the end of the text. Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take more text, return what can be released. Look at `matched` afterwards.

        While not `armed` (fewer than min_tokens tokens so far) a stop string that completes is text like any other.
        """
        if not self._automata:
            return text
        start = len(self._held)
        pending = self._held + text
        for end in range(start + 1, len(pending) + 1):
            char = pending[end - 1]
            complete = [automaton.stop for automaton in self._automata if automaton.step(char)]
            if complete and armed:
                self.matched = max(complete, key=len)
                self._held = ""
                return pending[: end if self._include_stop else end - len(self.matched)]
        cut = len(pending) - max(automaton.state for automaton in self._automata)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The text has ended without a match: what was held back is text."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth, Morris and Pratt 1977, "Fast pattern matching in strings"."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0  # always a proper prefix of `stop`
        # borders[n]: length of the longest proper prefix of stop[:n] that is also its suffix
        self._borders = [0] * (len(stop) + 1)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._borders[length]
            length += stop[index] == stop[length]
            self._borders[index + 1] = length

    def step(self, char: str) -> bool:
        """Take one character; whether it completes the stop string."""
        state = self.state
        while state and self.stop[state] != char:
            state = self._borders[state]
        state += self.stop[state] == char
        complete = state == len(self.stop)
        self.state = self._borders[state] if complete else state
        return complete
