"""Real services for tests that run in an environment of their own, which has none of our packages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("TANDEM_PYTHON", str(ROOT / ".venv/bin/python"))  # of the environment that has Tandem


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a gateway with real services behind it."""
    with subprocess.Popen(
        [PYTHON, "-m", "tests.clients.serve", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()  # its end, where the start failed: stderr says why
        assert url.startswith("http://"), "the services did not start"
        yield url
        # Leaving Popen closes stdin, which ends the services, and waits.
