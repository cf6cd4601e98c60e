"""The record of a running `tandem up`: never stale, never half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.state import UpState, is_running, recorded, running
from tandem.errors import TandemError

_HOLD = """
import os, sys
from pathlib import Path
from tandem.cli.state import UpState, recorded
state = UpState(pid=os.getpid(), port=8000, url="http://127.0.0.1:8000", stop_seconds=1.0)
with recorded(Path(sys.argv[1]), state):
    print("held", flush=True)
    sys.stdin.read()
"""


def a_state(*, port: int = 8000) -> UpState:
    return UpState(pid=os.getpid(), port=port, url=f"http://127.0.0.1:{port}", stop_seconds=1.0)


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_what_is_recorded_is_found_and_gone_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    with recorded(folder, a_state(port=2)), recorded(folder, a_state(port=1)):
        assert running(folder) == [a_state(port=1), a_state(port=2)]
        assert is_running(folder, a_state(port=1))
    assert running(folder) == []
    assert list(folder.iterdir()) == []


def test_the_record_of_a_killed_process_is_stale(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with process:
        (state,) = running(tmp_path)
        assert state.pid == process.pid
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(tmp_path.iterdir()) != []  # the file stays, and says nothing
    assert running(tmp_path) == []
    assert not is_running(tmp_path, state)


def test_a_file_with_the_id_of_a_living_process_that_is_no_tandem_is_stale(tmp_path: Path) -> None:
    content = {"pid": os.getpid(), "port": 8000, "url": "u", "stop_seconds": 1.0}
    (tmp_path / "up-8000.json").write_text(json.dumps(content))
    assert running(tmp_path) == []


def test_a_stale_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "up-8000.json").write_text("not even JSON")
    with recorded(tmp_path, a_state()):
        assert running(tmp_path) == [a_state()]


def test_a_record_that_another_has_replaced_is_left_to_the_other(tmp_path: Path) -> None:
    with recorded(tmp_path, a_state()):
        process = holder(tmp_path)
    with process:
        (state,) = running(tmp_path)
        assert state.pid == process.pid
        process.communicate()
    assert running(tmp_path) == []


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TandemError, match="XDG_STATE_HOME"), recorded(tmp_path / "file", a_state()):
        pass


def test_an_error_inside_is_not_taken_for_one_of_the_record(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), recorded(tmp_path, a_state()):
        raise FileNotFoundError
