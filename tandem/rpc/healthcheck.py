"""`python -m tandem.rpc.healthcheck HOST:PORT`: exit 0 when the service there reports SERVING, for containers."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, *, timeout_seconds: float) -> bool:
    """Ask grpc.health.v1 once."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m tandem.rpc.healthcheck HOST:PORT", file=sys.stderr)
        return 2
    return 0 if is_serving(sys.argv[1], timeout_seconds=3.0) else 1


if __name__ == "__main__":
    sys.exit(main())
