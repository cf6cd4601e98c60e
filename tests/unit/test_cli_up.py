"""`tandem up` and `tandem down` as processes. Small packages of the services' names stand in for the services."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port

_MODEL_SERVICE = """
import json, os, signal, sys, time
def log(event, level="info", **fields):
    print(json.dumps({"event": event, "level": level, "timestamp": "2026-01-01T00:00:00Z", **fields}), flush=True)
name = NAME
signal.signal(signal.SIGTERM, lambda *_: (log("ended"), sys.exit(0)))
log("serving", pid=os.getpid(), model=os.environ[f"TANDEM_{name.upper()}_MODEL"], omp=os.environ["OMP_NUM_THREADS"])
lifetime = float(os.environ.get(f"FAKE_{name.upper()}_LIFETIME", "60"))
time.sleep(lifetime)
log("out_of_memory", level="error")
sys.exit(9)
"""
_GATEWAY = """
import http.server, json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("gateway ended", flush=True), sys.exit(0)))
status = os.environ.get("FAKE_STATUS", "ready")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if status == "unavailable" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"status": status, "reasons": ["because"]}).encode())
    def log_message(self, *_): pass
print(json.dumps({"event": "gateway", "pid": os.getpid()}), flush=True)
http.server.HTTPServer(("127.0.0.1", int(os.environ["TANDEM_GATEWAY_PORT"])), Handler).serve_forever()
"""


class Bench:
    """A place with the stand-ins, free ports and a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        packages = folder / "packages"
        sources = {
            "target_service": _MODEL_SERVICE.replace("NAME", '"target"'),
            "draft_service": _MODEL_SERVICE.replace("NAME", '"draft"'),
            "gateway": _GATEWAY,
        }
        for name, source in sources.items():
            (packages / name).mkdir(parents=True)
            (packages / name / "__init__.py").write_text("")
            (packages / name / "__main__.py").write_text(source)
        self.folder = folder
        self.state = folder / "state" / "tandem"
        self.port, *others = (free_port() for _ in range(5))
        names = ("--target-port", "--draft-port", "--target-metrics-port", "--draft-metrics-port")
        self._ports = ["--port", str(self.port)]
        for name, port in zip(names, others, strict=True):
            self._ports += [name, str(port)]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")},
            "PYTHONPATH": str(packages),
            "XDG_STATE_HOME": str(folder / "state"),
            "TANDEM_TARGET_MODEL": "big",  # not the bundled one, so that nothing is fetched
            "COLUMNS": "80",  # what is longer must not be wrapped
        }

    def up(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        """Three services, unless the options say something of the draft."""
        draft = () if any("draft" in option for option in options) else ("--draft-model", "small")
        return subprocess.Popen(
            [*_tandem("up"), *self._ports, *draft, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment | environment,
        )

    def down(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_tandem("down"), *options], capture_output=True, text=True, timeout=60, env=self.environment, check=False
        )


def _tandem(name: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli", name]


def _is_gone(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def _until_gone(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while not all(map(_is_gone, process_ids)):
        assert time.monotonic() < deadline, "a process is left behind"
        time.sleep(0.02)


def _process_ids(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"pid=(\d+)", text)]


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    read = ""
    while text not in read:
        line = process.stdout.readline()
        assert line, f"{text!r} did not come; there is:\n{read}"
        read += line
    return read


def _read_until_served(process: subprocess.Popen[str], *, num_services: int = 3) -> str:
    """The stand-in gateway is ready at once, so what the services say may come before the summary or after."""
    shown = _read_until(process, "Ctrl-C stops it")
    while len(_process_ids(shown)) < num_services:
        shown += _read_until(process, "pid=")
    return shown


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_up_serves_says_how_to_use_it_and_leaves_nothing_behind(bench: Bench) -> None:
    with _ended(bench.up()) as process:
        shown = _read_until_served(process)
        pids = _process_ids(shown)
        assert "target  | " in shown
        assert "serving" in shown
        assert "model=big" in shown
        assert "omp=1" in shown
        assert f"Serving at http://127.0.0.1:{bench.port}" in shown
        assert f"  tandem chat --url http://127.0.0.1:{bench.port}\n" in shown
        assert '"content":"Why is the sky blue?"}],"stream":true}\'\n' in shown  # in one line, whatever the width
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 0
    assert rest.index("gateway ended") < rest.index("ended\n", rest.index("gateway ended") + len("gateway ended"))
    assert all(map(_is_gone, pids))
    assert list(bench.state.iterdir()) == []


def test_down_ends_what_up_has_started_and_says_so(bench: Bench) -> None:
    with _ended(bench.up()) as process:
        pids = _process_ids(_read_until_served(process))
        other = bench.down("--port", "1")
        assert "nothing to end" in other.stdout
        done = bench.down()
        assert (done.returncode, done.stdout) == (0, f"ended http://127.0.0.1:{bench.port}\n")
        assert all(map(_is_gone, pids))
        process.communicate(timeout=30)
        assert process.returncode == 0
    again = bench.down()
    assert again.returncode == 0
    assert "nothing to end" in again.stdout


def test_a_port_in_use_is_told_before_anything_starts(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", bench.port)), _ended(bench.up()) as process:
        shown, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"error: port {bench.port} on 127.0.0.1, for the gateway, is in use: choose another with --port" in shown
    assert "serving" not in shown
    assert "Traceback" not in shown


def test_a_second_up_is_told_of_the_first(bench: Bench) -> None:
    with _ended(bench.up()) as first:
        _read_until_served(first)
        with _ended(bench.up()) as second:
            shown, _ = second.communicate(timeout=30)
        assert second.returncode == 1
        assert f"running already, at http://127.0.0.1:{bench.port}: `tandem down` ends it" in shown
        first.terminate()
        first.communicate(timeout=30)


def test_the_end_of_the_target_ends_all_with_its_last_lines_and_exit_code_1(bench: Bench) -> None:
    with _ended(bench.up(FAKE_TARGET_LIFETIME="0.5")) as process:
        shown, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    _, _, after = shown.partition("target stopped (exit status 9)")
    assert "out_of_memory" in after
    assert all(map(_is_gone, _process_ids(shown)))


def test_the_end_of_the_draft_is_told_and_it_comes_back(bench: Bench) -> None:
    with _ended(bench.up(FAKE_DRAFT_LIFETIME="0.1")) as process:
        shown = _read_until(process, "draft stopped (exit status 9)")
        shown += _read_until(process, "draft   | ")
        process.terminate()
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert all(map(_is_gone, _process_ids(shown + rest)))


def test_killing_up_itself_ends_its_children_and_down_is_not_fooled(bench: Bench) -> None:
    with _ended(bench.up()) as process:
        pids = _process_ids(_read_until_served(process))
        process.kill()
        process.wait()
    _until_gone(pids)
    assert "nothing to end" in bench.down().stdout


def test_a_degraded_gateway_serves_and_the_reason_is_shown(bench: Bench) -> None:
    with _ended(bench.up(FAKE_STATUS="degraded")) as process:
        shown = _read_until_served(process)
        assert "Plain decoding for now: because." in shown
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize(("options", "is_plain"), [(["--no-draft"], True), (["--draft-table", "none"], False)])
def test_without_a_draft_model_no_draft_service_is_started(bench: Bench, options: list[str], is_plain: bool) -> None:
    with _ended(bench.up(*options, FAKE_STATUS="degraded" if is_plain else "ready")) as process:
        shown = _read_until_served(process, num_services=2)
        assert ("Without a draft: plain decoding." in shown) == is_plain
        process.terminate()
        process.communicate(timeout=30)


def test_stopping_while_the_model_loads_works_too(bench: Bench) -> None:
    with _ended(bench.up(FAKE_STATUS="unavailable")) as process:
        shown = _read_until(process, "waiting for the target to load big")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert all(map(_is_gone, _process_ids(shown + rest)))
    assert "Serving at" not in rest


def test_detached_it_returns_once_it_serves_and_goes_on_until_down(bench: Bench) -> None:
    log = bench.state / f"up-{bench.port}.log"
    try:
        with _ended(bench.up("--detach")) as process:
            shown, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "It goes on in the background" in shown
        assert str(log) in shown
        while len(pids := _process_ids(log.read_text())) < 3:
            time.sleep(0.02)
        assert not any(map(_is_gone, pids))
    finally:
        done = bench.down()
    assert done.returncode == 0
    _until_gone(pids)
    assert log.read_text().endswith("tandem  | stopped\n")


def test_detached_it_tells_why_it_does_not_serve(bench: Bench) -> None:
    with _ended(bench.up("--detach", FAKE_TARGET_LIFETIME="0.2", FAKE_STATUS="unavailable")) as process:
        shown, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "out_of_memory" in shown
    assert f"up-{bench.port}.log" in shown


def test_options_that_contradict_each_other_are_refused(bench: Bench) -> None:
    with _ended(bench.up("--no-draft", "--draft-layers", "2")) as process:
        shown, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "--no-draft" in shown
