"""Where the stages of `tandem distill` say how far they are."""

from __future__ import annotations

from typing import Protocol


class Display(Protocol):
    """The terminal, or a test."""

    def say(self, line: str) -> None: ...

    def progress(self, stage: str, *, completed: float, total: float, words: str) -> None: ...
