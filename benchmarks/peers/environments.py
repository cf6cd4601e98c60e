"""Each peer family's own Python environment, `.venv-peers/NAME`: made once, and again when its requirements change.

`python -m benchmarks.peers.environments [NAME...]`, which `make bench-peers` runs first. What cannot be installed is
noted, left out of the benchmark, and tried again the next time. PIP_INSTALL_ARGS goes to `pip install` as it is.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".venv-peers"
NAMES = ("llama_cpp", "openvino", "transformers", "vllm")

_TIMEOUT_SECONDS = 2400.0  # llama.cpp is compiled: ten to twenty minutes on two cores
# The server alone, for the processor of this machine: no tests, no examples, no download of its web page.
_CMAKE_ARGUMENTS = (
    "-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
    "-DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)

# Comes from another index than torch, built for another torch: importing it fails. Text needs none of it.
_UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}


def python_of(name: str) -> Path:
    """The interpreter of the environment, whether it is there or not."""
    return FOLDER / name / "bin" / "python"


def version_of(name: str, package: str) -> str:
    """The version that is pinned for `package`, and so installed."""
    for line in requirements(name).read_text().splitlines():
        found, _, version = line.partition("==")
        if found == package:
            return version.split()[0]
    raise KeyError(f"{package} is not pinned in {requirements(name).name}")


def requirements(name: str) -> Path:
    return HERE / f"requirements-{name}.txt"


def why_missing(name: str) -> str | None:
    """Why the environment cannot be used; None: it can."""
    if _stamp(name).is_file():
        return None
    try:
        return _note(name).read_text().strip()
    except FileNotFoundError:
        return "not installed: `make bench-peers` does it"


def install(name: str) -> str | None:
    """Make the environment where it is missing or old; why it could not be made."""
    wanted = requirements(name).read_text()
    stamp, note = _stamp(name), _note(name)
    if stamp.is_file() and stamp.read_text() == wanted:
        return None
    FOLDER.mkdir(exist_ok=True)
    stamp.unlink(missing_ok=True)
    note.unlink(missing_ok=True)
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += [*shlex.split(os.environ.get("PIP_INSTALL_ARGS", "")), "--requirement", str(requirements(name))]
    problem = _run([sys.executable, "-m", "venv", str(FOLDER / name)]) or _run(pip)
    if problem is None and name in _UNWANTED:
        problem = _run([str(python_of(name)), "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED[name]])
    if problem is None:
        stamp.write_text(wanted)
    else:
        note.write_text(f"not installed: {problem}\n")
    return problem


def _run(command: list[str]) -> str | None:
    """Run it; its last words where it fails."""
    environment = {"CMAKE_ARGS": _CMAKE_ARGUMENTS, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1), **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done after {_TIMEOUT_SECONDS:.0f} s"
    except OSError as error:
        return f"cannot run {command[0]}: {error.strerror}"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " / ".join((errors or lines)[-2:])[:400] or f"exit status {done.returncode}"


def _stamp(name: str) -> Path:
    return FOLDER / name / "installed"


def _note(name: str) -> Path:
    return FOLDER / f"{name}.failed"


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        print(f"{name}: ", end="", flush=True)
        print(install(name) or "installed", flush=True)


if __name__ == "__main__":
    main()
