"""Write requirements.lock: one exact version of every package that any part of Tandem installs. Run by `make lock`.

pip itself resolves, so what is locked is what `pip install` would take; nothing is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXTRAS = "model,gateway,cli,dev"

# Not renewed by itself: a new torch is tried by hand, in its CPU and in its CUDA build.
HELD = ["torch==2.13.0"]

HEADER = """\
# The exact versions Tandem is tested with, as pip constraints: pip install -c requirements.lock -e '.[{extras}]'
# Written by `make lock`; do not edit. No index, no local version: torch may be its CPU or its CUDA build.
"""


def resolve(held: list[str]) -> dict[str, str]:
    """Ask pip for the newest set of versions that pyproject.toml and `held` allow; name to version."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "held.txt")
        constraints.write_text("\n".join(held))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run(
            [*command, "--constraint", str(constraints), "--report", str(report), f"{ROOT}[{EXTRAS}]"], check=True
        )
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"].partition("+")[0] for item in found}


def main() -> None:
    versions = resolve(HELD)
    del versions["tandem-serve"]
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    LOCK.write_text(HEADER.format(extras=EXTRAS) + pins)
    print(f"{LOCK.name}: {len(versions)} packages")


if __name__ == "__main__":
    main()
