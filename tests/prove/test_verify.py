"""`tandem verify` with its own settings on the bundled pair: under ten minutes, passes, and catches a wrong rule."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.stack import Stack

pytestmark = [pytest.mark.prove, pytest.mark.bundled, pytest.mark.timeout(1200)]

MAX_SECONDS = 600.0


@pytest.mark.parametrize("broken_rule", [None, "whole-law"])
def test_the_bundled_pair_passes_and_the_negative_control_fails(tmp_path: Path, broken_rule: str | None) -> None:
    """The draft is the target's own first 20 layers: wrong often enough for every line to be tested."""
    settings = {
        "TANDEM_DRAFT_DTYPE": "bfloat16",
        "TANDEM_DRAFT_NUM_LAYERS": "20",
        "TANDEM_GATEWAY_DRAFT_TIMEOUT_SECONDS": "30",
    }
    if broken_rule is not None:
        settings["TANDEM_BROKEN_RULE"] = broken_rule
    stack = Stack(folder=tmp_path, target_model="bundled", draft_model="bundled", settings=settings)
    if broken_rule is not None:
        stack.target.module = "tests.broken_target"
    file = tmp_path / "verify.json"
    with stack:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tandem.cli", "verify", "--url", stack.url, "--json", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    print(f"\n{done.stdout}\n{seconds:.0f} s")
    document = json.loads(file.read_text())
    assert seconds < MAX_SECONDS
    assert done.returncode == (0 if broken_rule is None else 1)
    assert document["passed"] is (broken_rule is None)
    assert (document["num_failed"] > 0) is (broken_rule is not None)
