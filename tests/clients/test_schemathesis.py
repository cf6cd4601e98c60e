"""schemathesis reads /openapi.json and sends what it allows, and what it does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("schemathesis")

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

EXAMPLES = int(os.environ.get("TANDEM_SCHEMATHESIS_EXAMPLES", "150"))  # for each operation and mode

ORDINARY = {"model": "tandem", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}


def _answer(url: str) -> str:
    text: str = httpx.post(f"{url}/v1/completions", json=ORDINARY, timeout=60).json()["choices"][0]["text"]
    return text


def test_i7_generated_requests_find_no_server_error_and_errors_of_one_shape_only(url: str, tmp_path: Path) -> None:
    """All checks but one: that whatever the schema allows is accepted. A schema cannot say what depends on the model
    (the vocabulary, the context), on two fields together, or that a field is known but refused.
    """
    before = _answer(url)
    run = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{url}/openapi.json"),
            *("--phases", "examples,coverage,fuzzing"),
            *("--checks", "all"),
            *("--exclude-checks", "positive_data_acceptance"),
            *("--max-examples", str(EXAMPLES)),
            *("--request-timeout", "20"),
            *("--seed", "1"),
            "--continue-on-failure",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    generated = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert generated is not None, run.stdout[-3000:]
    print(generated[0])
    assert int(generated[1]) == int(generated[2]) >= 500
    assert _answer(url) == before
