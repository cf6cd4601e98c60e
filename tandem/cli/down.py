"""`tandem down`: ends what `tandem up` started, and waits until it is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rich.console import Console

from tandem.cli.state import UpState, is_running, running
from tandem.errors import TandemError

_POLL_SECONDS = 0.05


def run_down(folder: Path, console: Console, *, port: int | None = None) -> None:
    """End every `tandem up` of this user, or only the one on `port`. Raises TandemError when one does not end."""
    states = [state for state in running(folder) if port in (None, state.port)]
    if not states:
        console.print("nothing to end: tandem up is not running" + (f" on port {port}" if port else ""))
        return
    for state in states:
        _ask_to_stop(state)
    for state in states:
        with console.status(f"waiting for {state.url} to finish its open answers"):
            _wait(folder, state)
        console.print(f"ended {state.url}")


def _ask_to_stop(state: UpState) -> None:
    try:
        os.kill(state.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has just ended by itself
    except PermissionError as error:
        raise TandemError(f"process {state.pid} at {state.url} belongs to another user: end it as that user") from error


def _wait(folder: Path, state: UpState) -> None:
    deadline = time.monotonic() + state.stop_seconds
    while is_running(folder, state):
        if time.monotonic() > deadline:
            raise TandemError(
                f"{state.url} does not end; `kill -KILL {state.pid}` ends it at once, and its services with it"
            )
        time.sleep(_POLL_SECONDS)
