"""Prometheus's own opinion of our metrics."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def check_metrics(exposition: str) -> None:
    """Fail unless `promtool check metrics` accepts the text of a /metrics page; skip where there is no promtool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is missing; it is in Debian's package prometheus")
        pytest.skip("promtool is missing; it is in Debian's package prometheus")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=exposition, capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, f"promtool check metrics:\n{checked.stdout}{checked.stderr}"
