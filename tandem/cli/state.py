"""Who runs `tandem up`: one small file for each gateway port, by which `tandem down` finds it.

The process that wrote a file holds a lock on it for as long as it lives, and the system lets go of the lock when the
process ends, however it ends. So a file without a lock is stale, and a recycled process id cannot be mistaken for ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import platformdirs

from tandem.errors import TandemError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpState:
    """A running `tandem up`, by its gateway. It ends within `stop_seconds` of being asked to."""

    pid: int
    port: int
    url: str
    stop_seconds: float


def state_dir() -> Path:
    """Where the files are: $XDG_STATE_HOME/tandem, or the platform's own place for such."""
    return platformdirs.user_state_path("tandem")


def log_path(folder: Path, port: int) -> Path:
    """Where a detached `tandem up` writes what it would show."""
    return folder / f"up-{port}.log"


@contextlib.contextmanager
def recorded(folder: Path, state: UpState) -> Iterator[None]:
    """`state` is on record, complete or not at all, while the context lasts."""
    path = _path(folder, state.port)
    with _written(path, state) as file:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # another may have taken the place: theirs stays
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    path.unlink()


def _written(path: Path, state: UpState) -> IO[str]:
    """The file at `path`, complete and locked from its first moment there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(prefix=".up-", dir=path.parent)
        file = os.fdopen(number, "w")
        json.dump(dataclasses.asdict(state), file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(temporary).replace(path)
    except OSError as error:
        raise TandemError(
            f"cannot write {path}: {error.strerror}; make the folder writable, or set XDG_STATE_HOME to one that is"
        ) from error
    return file


def running(folder: Path) -> list[UpState]:
    """Every `tandem up` of this user that runs now, by port."""
    states = [_locked_state(path) for path in folder.glob("up-*.json")]
    return sorted((state for state in states if state is not None), key=lambda state: state.port)


def is_running(folder: Path, state: UpState) -> bool:
    """Whether the process that wrote `state` still runs."""
    return _locked_state(_path(folder, state.port)) == state


def _path(folder: Path, port: int) -> Path:
    return folder / f"up-{port}.json"


def _locked_state(path: Path) -> UpState | None:
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return UpState(**json.load(file))
    except (FileNotFoundError, ValueError, TypeError):
        pass
    return None
