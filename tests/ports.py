"""Ports for the services that tests start."""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Iterator

_FIRST = 15_000
_LAST = 30_000  # below those that the kernel hands to outgoing connections, 32,768 and up: they would race with ours
_NUM_WORKERS = 8


def free_port() -> int:
    """A port that nobody listens on and that no other call gave, in this process or in another worker of the run.

    A service binds its port seconds after it was chosen, so "free now" alone lets two tests have the same one.
    """
    for port in _ports_of_this_worker():
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port left among those of this worker in {_FIRST} to {_LAST}")


@functools.cache
def _ports_of_this_worker() -> Iterator[int]:
    # pytest-xdist names its workers gw0, gw1, ...
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(_FIRST + worker % _NUM_WORKERS, _LAST, _NUM_WORKERS))
    random.Random().shuffle(ports)  # another run on the same machine starts elsewhere
    return iter(ports)
