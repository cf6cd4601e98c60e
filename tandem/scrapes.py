"""A port for Prometheus alone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from tandem.errors import TandemError


def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> int:
    """Answer scrapes on a thread of its own; returns the port (0 takes a free one). Raises TandemError."""
    try:
        server, _thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise TandemError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
    return int(server.server_port)
