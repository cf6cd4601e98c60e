"""A sample of the prompts that come in, as a file that `tandem advise` reads. Off unless the settings name a file.

It is the only place where prompts are stored, so it is bounded and private: the first so many requests that were in
order, whole lines, never more than `MAX_FILE_BYTES`, mode 0600, no answers, no keys, no addresses. Lines are made and
written by a thread of its own, so no request waits for a disk; what comes faster than it writes is left out. A file
that cannot be written ends the recording, not the service.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

import structlog

from gateway.schemas import ChatBody, CompletionBody, GenerationBody
from tandem.errors import InvalidRequest

MAX_FILE_BYTES: Final = 48 << 20  # below what a workload may have
_MAX_WAITING: Final = 64  # entries that wait for the disk
_ROLES: Final = ("system", "user", "assistant")  # those that a workload knows
_PRIVATE: Final = 0o600


class PromptRecorder:
    """Appends to `path` until it has `most` lines, those that were there before it included.

    Raises InvalidRequest where the file cannot be opened for that.
    """

    def __init__(self, path: Path, *, most: int) -> None:
        try:
            self._file, self._taken, self._bytes = _opened(path)
        except OSError as error:
            raise InvalidRequest(f"cannot record prompts in {path}: {error.strerror}") from error
        self._most = most
        self._waiting = threading.BoundedSemaphore(_MAX_WAITING)
        self._broken = False
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    @property
    def full(self) -> bool:
        """Whether nothing more is taken."""
        return self._broken or self._taken >= self._most

    def record(self, body: GenerationBody) -> None:
        """Take the request's prompt, if there is room and a workload can say it. To be called on the event loop."""
        if self.full or (entry := entry_of(body)) is None or not self._waiting.acquire(blocking=False):
            return
        self._taken += 1
        self._writer.submit(self._write, entry)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.shutdown()
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        try:
            line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
            if self._broken or self._bytes + len(line) > MAX_FILE_BYTES:
                return
            self._file.write(line)
            self._file.flush()
            self._bytes += len(line)
        except (OSError, UnicodeEncodeError) as error:
            self._broken = True
            structlog.get_logger().error("recording_ended", error=type(error).__name__)  # not its words: no prompts
        finally:
            self._waiting.release()


def entry_of(body: GenerationBody) -> dict[str, Any] | None:
    """A workload's line: the prompt and the length that was asked for. None of what such a line cannot say: token ids,
    several prompts, roles of tools, a chat that does not end with the user."""
    limit = {} if not body.token_limit else {"max_tokens": body.token_limit}
    if isinstance(body, ChatBody):
        messages = [{"role": message.role, "content": message.content} for message in body.messages]
        fits = all(each["role"] in _ROLES and str(each["content"]).strip() for each in messages)
        return {"messages": messages, **limit} if fits and messages[-1]["role"] == "user" else None
    if isinstance(body, CompletionBody) and isinstance(body.prompt, str) and body.prompt.strip():
        return {"prompt": body.prompt, **limit}
    return None


def _opened(path: Path) -> tuple[IO[bytes], int, int]:
    """The file, private, and how many lines and bytes it has. A link is not followed."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, _PRIVATE)
    file = os.fdopen(handle, "r+b", buffering=0)
    os.fchmod(handle, _PRIVATE)
    file.seek(0)
    lines, size = 0, 0
    while block := file.read(1 << 20):
        lines, size = lines + block.count(b"\n"), size + len(block)
    return file, lines, size
