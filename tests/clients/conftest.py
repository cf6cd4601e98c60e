"""Tests with the clients people use. They run in an environment of their own (`make test-clients`), which has none of
our packages; so the services run in the project's, as a child that serve.py starts.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.serving import serving

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or LiteLLM asks the internet at import

collect_ignore_glob = [] if importlib.util.find_spec("litellm") else ["test_*.py"]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A tiny random model with a context of 256 tokens: no answer takes long, whatever a client asks for."""
    with serving("--context-length", "256") as address:
        yield address
