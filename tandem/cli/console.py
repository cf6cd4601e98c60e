"""What every command shares in talking to a terminal. Text that others wrote may not steer it."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

# Everything that moves cursors, clears screens or renames windows: C0 but for tab and line feed, DEL, and C1.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """`text` without control characters: nothing of it can reach the terminal as a command."""
    return text.translate(_CONTROLS)


def stdout_console() -> Console:
    """For results."""
    return Console(file=sys.stdout, highlight=False)


def stderr_console() -> Console:
    """For everything about the results: progress, notices, errors."""
    return Console(file=sys.stderr, highlight=False)


def print_error(console: Console, message: str) -> None:
    """One error, in the words of whoever found it."""
    console.print(Text.assemble(("error: ", "bold red"), printable(message)), soft_wrap=True)
