"""`python -m tandem.rpc.healthcheck HOST:PORT`: exit 0 when the service there reports SERVING, for containers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import TandemError
from tandem.rpc.tls import channel_credentials


def is_serving(address: str, *, timeout_seconds: float, credentials: grpc.ChannelCredentials | None = None) -> bool:
    """Ask grpc.health.v1 once; without credentials, without TLS."""
    opened = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    with opened as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tandem.rpc.healthcheck", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--ca", type=Path, help="PEM: the service speaks TLS, with a certificate that this signed")
    parser.add_argument("--certificate", type=Path, help="PEM: what is shown to a service that asks for one")
    parser.add_argument("--key", type=Path, help="PEM: its key")
    given = parser.parse_args()
    try:
        credentials = channel_credentials(ca_file=given.ca, certificate_file=given.certificate, key_file=given.key)
    except TandemError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0 if is_serving(given.address, timeout_seconds=3.0, credentials=credentials) else 1


if __name__ == "__main__":
    sys.exit(main())
