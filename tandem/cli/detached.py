"""`tandem up --detach`: the same run as a process in the background, and the wait until it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from tandem.cli.announce import wait_until_serving
from tandem.cli.plan import UpOptions
from tandem.cli.up_view import UpView
from tandem.errors import TandemError

_POLL_SECONDS = 0.1


def fork_into_background(log: Path) -> int:
    """Go on twice: 0 in the background process, which writes to `log`; its process id here.

    Call it before any thread or event loop exists: neither survives a fork.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise TandemError(
            f"cannot write {log}: {error.strerror}; make the folder writable, or set XDG_STATE_HOME to one that is"
        ) from error
    process_id = os.fork()
    if process_id == 0:
        os.setsid()  # no terminal, so no Ctrl-C and no hang-up from it
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, stream in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(number, stream)
        os.close(nothing)
    os.close(output)
    return process_id


async def wait_for_background(process_id: int, options: UpOptions, view: UpView, log: Path) -> int:
    """Until the background process serves (0) or has ended (1, with its last lines). Ctrl-C here ends it too."""
    began = time.monotonic()
    waiting = asyncio.create_task(wait_until_serving(options, view))
    try:
        while not waiting.done():
            if os.waitpid(process_id, os.WNOHANG)[0] == process_id:  # noqa: ASYNC222  (WNOHANG: it does not wait)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                view.background_failure(log)
                return 1
            await asyncio.wait({waiting}, timeout=_POLL_SECONDS)
    except asyncio.CancelledError:
        os.kill(process_id, signal.SIGTERM)
        raise
    view.serving(
        waiting.result(),
        options,
        seconds=time.monotonic() - began,
        how_to_stop=f"It goes on in the background; `tandem down` stops it. Its log: {log}",
    )
    return 0
