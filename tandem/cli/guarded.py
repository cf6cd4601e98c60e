"""`python -m tandem.cli.guarded PARENT_PID COMMAND...`: become COMMAND, as a process that never outlives its parent.

A parent ended by SIGKILL can stop nobody. On Linux the kernel does it: with PR_SET_PDEATHSIG this process asks to be
killed when its parent ends, and the request survives the exec that follows. It is made here, after the fork, because
running Python between fork and exec (`preexec_fn`) is not safe in a parent that has threads. Elsewhere there is no such
request, and children of a parent ended by SIGKILL have to be stopped by hand.

The kernel means the *thread* that started this process: start it from one that lives as long as the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def guarded_command(command: Sequence[str], *, parent_pid: int) -> list[str]:
    """The command line that runs `command` through this module. -P: no module is taken from the working folder."""
    return [sys.executable, "-P", "-m", "tandem.cli.guarded", str(parent_pid), *command]


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the request was made
        sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606  (no shell: the words are tandem's own)


if __name__ == "__main__":
    main()
