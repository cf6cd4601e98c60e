"""How many CPU cores this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Those that it is bound to, where the system tells; else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
