"""Shared by all tests."""

from __future__ import annotations

import grpc
import pytest


@pytest.fixture(scope="session", autouse=True)
def grpc_aio_stays() -> None:
    """One reference to grpc.aio's machinery for the whole run.

    When the last object that uses it is collected it joins its polling thread, inside whatever test runs then, and was
    seen to wait there for ever.
    """
    grpc.aio.init_grpc_aio()
