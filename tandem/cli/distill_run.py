"""`tandem distill` and its terminal: bars there, lines elsewhere; Ctrl-C and SIGTERM end it in good order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tandem.cli.console import printable, stderr_console
from tandem.distill.run import DistillOptions, run_distill

_LINE_SECONDS = 30.0  # between lines where nobody watches
_STOPPED = 3  # exit code: ended before it was done


def run(options: DistillOptions) -> int:
    """0 when the draft is there, 3 when the work was ended and goes on another time. Raises TandemError."""
    console = stderr_console()
    with _stopping() as stop, _Bars(console) as bars:
        done = run_distill(options, bars, stop.is_set)
    if not done:
        console.print("ended; the same command goes on from here")
    return 0 if done else _STOPPED


class _Bars:
    """A Display (see tandem/distill/display.py) with one bar for each stage."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._next_line = 0.0

    def __enter__(self) -> _Bars:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._console.print(printable(line), soft_wrap=True, markup=False)

    def progress(self, stage: str, *, completed: float, total: float, words: str) -> None:
        if not self._console.is_terminal:
            if time.monotonic() >= self._next_line:
                self._next_line = time.monotonic() + _LINE_SECONDS
                self.say(f"{stage}: {words}")
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, words=words)
        self._progress.update(self._tasks[stage], completed=completed, total=total, words=words)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM; a second one ends the process as usual."""
    stop = threading.Event()
    previous: dict[int, Any] = {}

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, previous[number])

    for wanted in (signal.SIGINT, signal.SIGTERM):
        previous[wanted] = signal.signal(wanted, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
