"""How many streams a model service has open: the bound, and its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.errors import Overloaded
from tandem.service_metrics import ServiceMetrics


class SessionSlots:
    """At most `max_sessions` streams at once; the next one is Overloaded."""

    def __init__(self, *, max_sessions: int, metrics: ServiceMetrics) -> None:
        self._max_sessions = max_sessions
        self._metrics = metrics
        self._open = 0

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold a slot for the length of a stream."""
        if self._open >= self._max_sessions:
            raise Overloaded(f"{self._max_sessions} sessions are open already")
        self._open += 1
        self._metrics.sessions.inc()
        self._metrics.sessions_total.inc()
        try:
            yield
        except asyncio.CancelledError:  # the client left: no error
            raise
        except Exception:
            self._metrics.errors_total.inc()
            raise
        finally:
            self._open -= 1
            self._metrics.sessions.dec()

    def count_round(self) -> None:
        self._metrics.rounds_total.inc()
