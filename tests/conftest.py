"""Shared by all tests."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def grpc_aio_stays() -> None:
    """One reference to grpc.aio's machinery for the whole run.

    When the last object that uses it is collected it joins its polling thread, inside whatever test runs then, and was
    seen to wait there for ever. The environment of tests/clients has no grpc.
    """
    if importlib.util.find_spec("grpc") is not None:
        import grpc

        grpc.aio.init_grpc_aio()
