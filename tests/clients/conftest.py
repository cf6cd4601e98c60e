"""Tests with the clients people use. They run in an environment of their own (`make test-clients`), which has none of
our packages; so the services run in the project's, as a child that serve.py starts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("TANDEM_PYTHON", str(ROOT / ".venv/bin/python"))  # of the environment that has Tandem

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or LiteLLM asks the internet at import

collect_ignore_glob = [] if importlib.util.find_spec("litellm") else ["test_*.py"]


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


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A tiny random model with a context of 256 tokens: no answer takes long, whatever a client asks for."""
    with serving("--context-length", "256") as address:
        yield address
