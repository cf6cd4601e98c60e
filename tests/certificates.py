"""Certificates for tests: what deploy/certificates.sh gives a user, made by it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.rpc.tls import channel_credentials

SCRIPT = Path(__file__).parents[1] / "deploy/certificates.sh"


@dataclass(frozen=True)
class Certificates:
    """A folder that deploy/certificates.sh has written."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        subprocess.run([SCRIPT, folder], check=True, capture_output=True, timeout=60)
        return cls(folder)

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def channel(self, name: str) -> grpc.ChannelCredentials:
        """Of a caller that shows the certificate of `name`."""
        credentials = channel_credentials(
            ca_file=self.ca, certificate_file=self.certificate(name), key_file=self.key(name)
        )
        assert credentials is not None
        return credentials

    def environment(self) -> dict[str, str]:
        """Mutual TLS between all three services, and HTTPS at the gateway."""
        variables = {
            "TANDEM_GATEWAY_TLS_CERTIFICATE_FILE": self.certificate("gateway"),
            "TANDEM_GATEWAY_TLS_KEY_FILE": self.key("gateway"),
            "TANDEM_GATEWAY_RPC_CA_FILE": self.ca,
            "TANDEM_GATEWAY_RPC_CERTIFICATE_FILE": self.certificate("gateway"),
            "TANDEM_GATEWAY_RPC_KEY_FILE": self.key("gateway"),
        }
        for name in ("target", "draft"):
            variables[f"TANDEM_{name.upper()}_TLS_CERTIFICATE_FILE"] = self.certificate(name)
            variables[f"TANDEM_{name.upper()}_TLS_KEY_FILE"] = self.key(name)
            variables[f"TANDEM_{name.upper()}_TLS_CLIENT_CA_FILE"] = self.ca
        return {name: str(path) for name, path in variables.items()}
