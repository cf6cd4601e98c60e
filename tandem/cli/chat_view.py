"""What `tandem chat` shows: the answer, drafted tokens apart from the target's own, and a line of figures below."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from tandem.cli.chat_client import Piece, Report
from tandem.cli.console import printable


def accepted_style(console: Console) -> str:
    """How accepted drafted tokens look: a colour, or a line below them where colours are not wanted."""
    return "underline" if console.no_color else "green"


class AnswerView:
    """Writes answers to `out`, and everything about them to `aside`."""

    def __init__(self, out: Console, aside: Console) -> None:
        self._out = out
        self._aside = aside

    def legend(self) -> None:
        """What the colours mean; nothing where there are none."""
        if self._out.is_terminal and not self._out.is_dumb_terminal:
            sample = ("drafted and accepted", accepted_style(self._out))
            self._aside.print(Text.assemble(sample, " / the target's own"), soft_wrap=True)

    def piece(self, piece: Piece) -> None:
        """A piece of the answer, right behind the one before."""
        style = Style.parse(accepted_style(self._out)) if piece.accepted else None
        # Segments are written as they are: no wrapping, and no blank is lost at the end of a line.
        self._out.print(Segments([Segment(printable(piece.text), style)]), end="", crop=False)

    def end_line(self) -> None:
        self._out.out("")

    def figures(self, figures: Figures) -> None:
        self._aside.print(Text(figures.summary(), "dim"), soft_wrap=True)

    def notice(self, text: str) -> None:
        self._aside.print(Text(text, "dim"), soft_wrap=True)


@dataclass(slots=True)
class Figures:
    """Counts and times of one answer. Seconds run from the request on; the rate, from the first token on."""

    report: Report
    num_tokens: int = 0
    first_seconds: float | None = None
    num_first_tokens: int = 0  # those that came with the first
    last_seconds: float = 0.0

    def timed(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Pass `pieces` on, and note when each came. Begin to iterate as the request begins."""
        began = time.monotonic()
        for piece in pieces:
            self.last_seconds = time.monotonic() - began
            self.num_tokens += piece.num_tokens
            if self.first_seconds is None and piece.num_tokens:
                self.first_seconds, self.num_first_tokens = self.last_seconds, piece.num_tokens
            yield piece

    def summary(self) -> str:
        """One line; what is not known is left out."""
        num_tokens = self.report.num_tokens or self.num_tokens
        parts = [f"{num_tokens} token" + ("" if num_tokens == 1 else "s")]
        if self.first_seconds is not None:
            seconds = self.last_seconds - self.first_seconds
            if seconds > 0 and num_tokens > self.num_first_tokens:
                parts.append(f"{(num_tokens - self.num_first_tokens) / seconds:.1f} tokens/s")
            parts.append(f"first token {self.first_seconds:.2f} s")
        parts += _speculation_parts(self.report.speculation)
        if self.report.finish_reason == "length":
            parts.append("cut off by the length limit")
        return " · ".join(parts)


def _speculation_parts(speculation: dict[str, Any]) -> list[str]:
    parts: list[str] = []
    if speculation.get("drafted"):
        rate = speculation.get("acceptance_rate") or 0.0
        parts.append(f"{rate:.0%} of {speculation['drafted']} drafted accepted")
    elif speculation:
        parts.append("nothing drafted")
    if (length := speculation.get("acceptance_length")) is not None:
        parts.append(f"{length:.2f} tokens per target call")
    if (seed := speculation.get("seed")) is not None:
        parts.append(f"seed {seed}")
    return parts
