"""`tandem chat` as a process: over pipes, and on a pseudo-terminal. The gateway is a small HTTP server in the test."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

# Makes standard input the controlling terminal, so that Ctrl-C typed there becomes SIGINT, and becomes the command.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_SPECULATION = {"drafted": 4, "acceptance_rate": 0.5, "acceptance_length": 2.0, "seed": 1}


class FakeGateway(ThreadingHTTPServer):
    """Repeats the last message, its first word as the target's own and the rest as accepted.

    "forever" is an answer without end, "fail" an error in the middle of one.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.client_left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeGateway

    def do_GET(self) -> None:
        content = json.dumps({"data": [{"id": "tiny"}, {"id": "tandem"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][-1]["content"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        first, blank, rest = question.partition(" ")
        self._say(first, "plain")
        if question == "forever":
            try:
                while True:
                    self._say(" more", "accepted")
                    time.sleep(0.01)
            except OSError:
                self.server.client_left.set()
            return
        if question == "fail":
            self._send({"error": {"message": "the target went away", "code": "unavailable"}})
            return
        self._say(blank + rest, "accepted")
        self._send({"choices": [{"delta": {}, "finish_reason": "stop", "trace": []}], "speculation": _SPECULATION})
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, text: str, origin: str) -> None:
        trace = [{"token_id": 1, "text": text, "origin": origin, "round": 0, "position": 0}]
        self._send({"choices": [{"delta": {"content": text}, "finish_reason": None, "trace": trace}]})

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def command(url: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli", "chat", "--url", url, *options]


def environment(**more: str) -> dict[str, str]:
    """Without what the machine that runs the tests may say about terminals."""
    names = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "PYTHONWARNINGS")
    return {name: value for name, value in os.environ.items() if name not in names} | more


def over_a_pipe(url: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, *options), input=text, capture_output=True, text=True, timeout=60, env=environment(), check=False
    )


def test_each_line_of_a_pipe_is_answered_and_only_answers_are_on_standard_output(gateway: FakeGateway) -> None:
    done = over_a_pipe(gateway.url, "Hello you\n\n/seed 3\nGood bye now\n")
    assert done.stdout == "Hello you\nGood bye now\n"
    assert done.returncode == 0
    figures = [line for line in done.stderr.splitlines() if "drafted accepted" in line]
    assert len(figures) == 2
    assert "50% of 4 drafted accepted" in figures[0]
    assert "\x1b" not in done.stdout + done.stderr


def test_an_error_over_a_pipe_ends_it_with_exit_code_1(gateway: FakeGateway) -> None:
    done = over_a_pipe(gateway.url, "fail\nnever asked\n")
    assert done.returncode == 1
    assert done.stdout == "fail\n"  # what came before the error
    assert "error: the answer broke off: the target went away" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_gateway_at_all_is_one_line_and_exit_code_1() -> None:
    done = over_a_pipe("http://127.0.0.1:1", "hi\n")
    assert done.returncode == 1
    assert "tandem up" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_bad_option_is_exit_code_2_or_1_and_asks_nothing() -> None:
    assert over_a_pipe("http://127.0.0.1:1", "", "--temperature", "9").returncode == 2
    done = over_a_pipe("http://127.0.0.1:1", "", "--num-draft-tokens", "many")
    assert done.returncode == 1
    assert "auto" in done.stderr


class Terminal:
    """A process on a pseudo-terminal: what it wrote, what is typed, and waiting for a text."""

    def __init__(self, arguments: list[str], **more: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(TERM="xterm-256color", **more),
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """Everything up to and with `text`, which is then taken off."""
        deadline = time.monotonic() + 30
        while text not in self.text:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come; there is {self.text!r}"
            self.text += os.read(self._master, 65536).decode()
        before, _, self.text = self.text.partition(text)
        return before + text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def on_a_terminal(arguments: list[str], **more: str) -> Iterator[Terminal]:
    terminal = Terminal(arguments, **more)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_chat_on_a_terminal_from_the_greeting_to_ctrl_d(gateway: FakeGateway) -> None:
    with on_a_terminal(command(gateway.url)) as terminal:
        greeting = terminal.wait_for("> ")
        assert "tiny at http://127.0.0.1" in greeting
        assert "\x1b[32mdrafted and accepted\x1b[0m" in greeting
        terminal.type("Hello you\n")
        answer = terminal.wait_for("> ")
        assert "Hello\x1b[32m you\x1b[0m\r\n" in answer
        assert "50% of 4 drafted accepted" in answer
        terminal.type("/k nonsense\n")
        assert "error:" in terminal.wait_for("> ")
        terminal.type("/help\n")
        assert "/reset" in terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=30) == 0


def test_ctrl_c_stops_the_answer_and_not_the_chat(gateway: FakeGateway) -> None:
    with on_a_terminal(command(gateway.url)) as terminal:
        terminal.wait_for("> ")
        terminal.type("forever\n")
        terminal.wait_for(" more")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        assert gateway.client_left.wait(timeout=10)
        terminal.wait_for("> ")
        terminal.type("\x03")  # nothing runs now
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(timeout=30) == 0


def test_where_colours_are_not_wanted_accepted_tokens_are_underlined(gateway: FakeGateway) -> None:
    with on_a_terminal(command(gateway.url), NO_COLOR="1") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello you\n")
        assert "Hello\x1b[4m you\x1b[0m" in terminal.wait_for("> ")


def test_ctrl_c_over_a_pipe_ends_the_chat_as_it_ends_other_programs(gateway: FakeGateway) -> None:
    with subprocess.Popen(
        command(gateway.url), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"forever\nnever asked\n")
        process.stdin.flush()
        assert process.stdout.read(len("forever more")) == b"forever more"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
