"""Where and with what a figure was measured: commit, processor, memory, versions, threads."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tandem import __version__

_PACKAGES: Final = ("torch", "transformers", "openvino", "numpy", "grpcio", "httpx", "uvicorn")
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def describe_machine(environment: Mapping[str, str]) -> dict[str, Any]:
    """This machine and this installation; the services' own where they run here and from here."""
    return {
        "tandem": __version__,
        "commit": commit(Path(__file__).parents[2]),
        "cpu": cpu_model(_read("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": installed_versions(),
        "threads": {name: environment[name] for name in _THREAD_VARIABLES if name in environment},
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute: what else ran here
    }


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in /proc/cpuinfo; empty where it has none."""
    for line in cpuinfo.split("\n"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def commit(folder: Path) -> str | None:
    """The checkout's commit, `+` where files differ from it; None outside a checkout."""
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return None
    head = _output(git, "-C", str(folder), "rev-parse", "HEAD")
    changed = _output(git, "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{head}+" if head and changed else head


def installed_versions() -> dict[str, str]:
    """Of the packages that matter for speed, those that are here."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)  # noqa: S603  (git, found above)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
