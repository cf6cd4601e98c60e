"""What a reader needs beside the figures: commit, processor, cores, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.process import REPOSITORY


def bind_to_cores(cores: Sequence[int]) -> None:
    """This process and all that it starts. Raises ValueError where the machine does not have them."""
    available = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - available):
        raise ValueError(f"cores {missing} are not among this machine's: {sorted(available)}")
    os.sched_setaffinity(0, cores)


def first_cores(count: int) -> list[int]:
    """The first so many that may be used; fewer where there are fewer."""
    return sorted(os.sched_getaffinity(0))[:count]


def machine_facts(cores: Sequence[int]) -> dict[str, Any]:
    """Of this machine and this commit. No names of hosts, no paths."""
    return {
        "processor": _processor(),
        "cores": list(cores),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "load_average": os.getloadavg()[0],  # before the run: others at work on the machine show here
    }


def _processor() -> str:
    """As the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _git(*words: str) -> str:
    try:
        return subprocess.run(
            ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
