"""The child's half: a peer that is a library answers JSON lines, in an environment of its own.

One line in, one line out: `{"command": "start", "setting": {...}}`, then `{"command": "generate", "prompt": [ids],
"max_tokens": n}` again and again, until standard input ends. An answer is `{"ok": {...}}` or `{"error": "..."}`.

Nothing here or in the files that use it imports Tandem, or anything that a peer's environment may lack.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol


class Library(Protocol):
    """A peer in this process."""

    def start(self, setting: dict[str, Any]) -> dict[str, Any]:
        """Load. What comes back has `versions`, by package."""

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Answer. What comes back are the fields of a Result."""


class Clock:
    """Notes when tokens come: `tokens(n)` for each step, and `result` at the end. Starts when it is made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self.num_steps = 0

    def tokens(self, count: int) -> None:
        if count == 0:
            return
        if self._first is None:
            self._first = time.perf_counter() - self._began, count
        self.num_steps += 1

    def result(self, token_ids: Sequence[int], *, num_calls: int | None = None) -> dict[str, Any]:
        """The fields of a Result, the text left to the parent, which has the tokenizer."""
        total = time.perf_counter() - self._began
        first_seconds, first_num_tokens = self._first or (total, len(token_ids))
        return {
            "token_ids": [int(token_id) for token_id in token_ids],
            "first_token_seconds": first_seconds,
            "first_num_tokens": first_num_tokens,
            "total_seconds": total,
            "num_calls": self.num_steps if num_calls is None else num_calls,
        }


def serve(library: Library) -> None:
    """Answer until standard input ends. What libraries print goes to standard error, not between the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            if request["command"] == "start":
                answer = {"ok": library.start(request["setting"])}
            else:
                answer = {"ok": library.generate(request["prompt"], request["max_tokens"])}
        except Exception as error:  # noqa: BLE001  (whatever a library raises is the answer)
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
