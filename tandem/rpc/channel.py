"""Client channels to the model services."""

from __future__ import annotations

import grpc

_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A service that comes back is found again within 2 s; the default backoff grows to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The log-probabilities of a scored prompt: 170 bytes a token with 20 alternatives; 4 MiB would hold 25,000 tokens.
    ("grpc.max_receive_message_length", 64 << 20),
    # Each gateway process keeps its own connection, so that one peer's backoff does not slow another's.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A lazily connecting channel to `host:port`; without credentials, without TLS."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
