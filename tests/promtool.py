"""Prometheus's own opinion of our metrics and our rules."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; skip where there is none, as it is no Python package."""
    program = shutil.which("promtool")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is missing; it is in Debian's package prometheus")
        pytest.skip("promtool is missing; it is in Debian's package prometheus")
    return subprocess.run([program, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)


def check_metrics(exposition: str) -> None:
    """Fail unless `promtool check metrics` accepts the text of a /metrics page."""
    checked = promtool("check", "metrics", text=exposition)
    assert checked.returncode == 0, f"promtool check metrics:\n{checked.stdout}{checked.stderr}"
