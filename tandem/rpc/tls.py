"""TLS between the gateway and the services: certificate files in, gRPC's credentials out.

With an authority on both sides it is mutual: each side shows a certificate, and takes only those that its authority
signed. Files are read once, at the start; they are checked there, as gRPC itself would fail later, and without saying
which file it was.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from tandem.errors import InvalidRequest
from tandem.settings import RpcServerSettings


def server_credentials(settings: RpcServerSettings) -> grpc.ServerCredentials | None:
    """How a service listens; None: without TLS. Raises InvalidRequest, which names the files."""
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    if certificate is None or key is None:
        return None
    check_certificate(certificate, key)
    authority = settings.tls_client_ca_file
    if authority is None:
        return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    check_authority(authority)
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=authority.read_bytes(),
        require_client_auth=True,
    )


def channel_credentials(
    *, ca_file: Path | None, certificate_file: Path | None, key_file: Path | None
) -> grpc.ChannelCredentials | None:
    """How a caller connects; None: without TLS. Raises InvalidRequest, which names the files."""
    if ca_file is None:
        return None
    check_authority(ca_file)
    if certificate_file is None or key_file is None:
        return grpc.ssl_channel_credentials(ca_file.read_bytes())
    check_certificate(certificate_file, key_file)
    return grpc.ssl_channel_credentials(ca_file.read_bytes(), key_file.read_bytes(), certificate_file.read_bytes())


def check_certificate(certificate_file: Path, key_file: Path) -> None:
    """Raises InvalidRequest unless the two are PEM files that belong together, the key not encrypted."""
    try:
        # With no password at all, OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate_file, key_file, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidRequest(
            f"the certificate {certificate_file} and the key {key_file} cannot be used: they must be PEM, belong "
            f"together, and the key must not be encrypted ({_reason(error)})"
        ) from None


def check_authority(ca_file: Path) -> None:
    """Raises InvalidRequest unless the file holds an authority's certificate, in PEM."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{ca_file} holds no authority's certificate, in PEM ({_reason(error)})") from None


def _reason(error: OSError | ValueError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror if isinstance(error, OSError) else ""
    return reason or type(error).__name__
