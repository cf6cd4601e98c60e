"""Shared by all tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

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


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Threads only get in each other's way on tensors as small as tests have."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    """For tests that log and do not look at it."""
    import structlog

    with structlog.testing.capture_logs():
        yield
