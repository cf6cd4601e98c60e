"""What travels with a call besides its messages: the request's id and, where traces are on, the trace it belongs to.

Bound once, where a request arrives, and read where a service is called: like a log's request id, it is about the
request as a whole, and nothing in between has to hand it on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

REQUEST_ID = "x-request-id"  # as in HTTP; the trace's own keys are W3C's (traceparent)
_HARMLESS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_outgoing: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("outgoing_metadata", default=())


def is_harmless(request_id: str) -> bool:
    """Whether an id from outside can go into a log and a header as it is."""
    return _HARMLESS_ID.fullmatch(request_id) is not None


@contextmanager
def outgoing_metadata(request_id: str, carrier: Mapping[str, str]) -> Iterator[None]:
    """Calls that are made in the block, and in tasks that begin in it, carry this."""
    token = _outgoing.set(((REQUEST_ID, request_id), *carrier.items()))
    try:
        yield
    finally:
        _outgoing.reset(token)


def call_metadata() -> tuple[tuple[str, str], ...]:
    """For a call that is made here; empty outside of a request."""
    return _outgoing.get()
