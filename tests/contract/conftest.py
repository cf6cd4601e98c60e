"""Shared by tests that run gRPC servers inside the test's event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest


@pytest.fixture(autouse=True)
async def servers_collected_in_time() -> AsyncIterator[None]:
    """A grpc.aio server's `__del__` schedules one more shutdown, stopped or not: collect it while its loop lives."""
    yield
    gc.collect()
    await asyncio.sleep(0.01)
