"""The parent's half: a library in a child process of its own environment. JSON lines, each with a limit."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.peers.peer import Model, PeerFailed, Prompt, Result, Setting
from benchmarks.peers.process import Process

Decode = Callable[[Sequence[int]], str]


class ChildPeer:
    """Runs `command`, which answers as child_protocol.py says. `decode` turns ids into text."""

    settle_seconds = 0.3

    def __init__(self, command: Sequence[str], model: Model, decode: Decode) -> None:
        self._command = command
        self._model = model
        self._decode = decode
        self._process: Process | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._versions: dict[str, str] = {}

    @property
    def versions(self) -> Mapping[str, str]:
        return self._versions

    def start(self, setting: Setting, *, timeout_seconds: float) -> None:
        self._lines = queue.SimpleQueue()
        threads = str(setting["threads"])
        environment = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._process = Process(self._command, environment=environment, piped=True)
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()
        paths = {"gguf": str(self._model.gguf), "folder": str(self._model.folder)}
        more = {**paths, "end_token_ids": list(self._model.end_token_ids)}
        answer = self._ask({"command": "start", "setting": {**setting, **more}}, timeout_seconds)
        self._versions = dict(answer["versions"])

    def generate(self, prompt: Prompt, *, max_tokens: int, timeout_seconds: float) -> Result:
        request = {"command": "generate", "prompt": list(prompt.token_ids), "max_tokens": max_tokens}
        answer = self._ask(request, timeout_seconds)
        token_ids = answer.pop("token_ids")
        return Result(num_tokens=len(token_ids), text=self._decode(token_ids), **answer)

    def stop(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None

    def _ask(self, request: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """The answer to `request`. Raises PeerFailed for an error, an end, and for nothing in time."""
        assert self._process is not None, "not started"
        stdin = self._process.popen.stdin
        assert stdin is not None, "not piped"
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise PeerFailed(f"ended: {self._process.last_words()}") from error
        try:
            line = self._lines.get(timeout=timeout_seconds)
        except queue.Empty:
            raise PeerFailed(f"no answer after {timeout_seconds:g} s") from None
        if line is None:
            self._lines.put(None)  # for whoever asks again
            raise PeerFailed(f"ended: {self._process.last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerFailed(f"not JSON: {line[:200]!r}") from error
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        ok: dict[str, Any] = answer["ok"]
        return ok


def _read(process: Process, lines: queue.SimpleQueue[str | None]) -> None:
    """Every line that `process` writes, and None when there will be no more."""
    assert process.popen.stdout is not None, "not piped"
    try:
        for line in process.popen.stdout:
            lines.put(line.decode(errors="replace"))
    except (OSError, ValueError):  # closed while it was read
        pass
    lines.put(None)
