"""Certificate files are checked at the start, and what is wrong is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draft_service.settings import DraftSettings
from gateway.settings import Settings
from tandem.errors import InvalidRequest
from tandem.rpc.tls import channel_credentials, check_authority, check_certificate, server_credentials
from target_service.settings import TargetSettings
from tests.certificates import SCRIPT, Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def test_a_pair_that_belongs_together_is_taken(certificates: Certificates) -> None:
    check_certificate(certificates.certificate("target"), certificates.key("target"))
    check_authority(certificates.ca)
    assert channel_credentials(ca_file=None, certificate_file=None, key_file=None) is None
    assert channel_credentials(ca_file=certificates.ca, certificate_file=None, key_file=None) is not None
    assert server_credentials(TargetSettings()) is None
    pair: dict[str, Any] = {
        "tls_certificate_file": certificates.certificate("target"),
        "tls_key_file": certificates.key("target"),
    }
    assert server_credentials(TargetSettings(**pair)) is not None
    assert server_credentials(TargetSettings(**pair, tls_client_ca_file=certificates.ca)) is not None


def test_what_cannot_be_used_is_named(certificates: Certificates, tmp_path: Path) -> None:
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(
        ["openssl", "pkey", "-in", certificates.key("target"), "-aes256", "-passout", "pass:x", "-out", encrypted],
        check=True,
    )
    empty = tmp_path / "empty.pem"
    empty.touch()
    good = certificates.certificate("target")
    for certificate, key in (
        (good, certificates.key("draft")),
        (good, encrypted),
        (good, empty),
        (empty, certificates.key("target")),
        (certificates.key("target"), good),
        (tmp_path / "missing.pem", certificates.key("target")),
    ):
        with pytest.raises(InvalidRequest) as raised:
            check_certificate(certificate, key)
        assert str(certificate) in raised.value.message
        assert str(key) in raised.value.message
    for file in (empty, certificates.key("target"), tmp_path / "missing.pem"):
        with pytest.raises(InvalidRequest, match=str(file)):
            check_authority(file)


@pytest.mark.parametrize(
    ("settings", "given", "named"),
    [
        (Settings, {"tls_key_file"}, "tls_key_file needs tls_certificate_file"),
        (Settings, {"tls_certificate_file"}, "tls_certificate_file needs tls_key_file"),
        (Settings, {"rpc_ca_file", "rpc_certificate_file"}, "rpc_certificate_file needs rpc_key_file"),
        (Settings, {"rpc_key_file", "rpc_certificate_file"}, "rpc_certificate_file needs rpc_ca_file"),
        (TargetSettings, {"tls_key_file"}, "tls_key_file needs tls_certificate_file"),
        (DraftSettings, {"tls_client_ca_file"}, "tls_client_ca_file needs tls_certificate_file and tls_key_file"),
    ],
)
def test_half_of_what_belongs_together_is_refused(
    settings: type[Settings | TargetSettings | DraftSettings], given: set[str], named: str, certificates: Certificates
) -> None:
    fields: dict[str, Any] = dict.fromkeys(given, certificates.ca)
    with pytest.raises(ValueError, match=named):
        settings(**fields)


def test_a_variable_that_is_set_to_nothing_is_not_set() -> None:
    assert Settings(tls_key_file="", api_keys_file="").tls_key_file is None


@pytest.mark.parametrize(
    ("module", "variables", "code", "said"),
    [
        ("gateway", {"TANDEM_GATEWAY_PORT": "many"}, 2, "TANDEM_GATEWAY_PORT"),
        ("gateway", {"TANDEM_GATEWAY_TLS_KEY_FILE": "/nope"}, 2, "TANDEM_GATEWAY_TLS_KEY_FILE"),
        ("gateway", {"TANDEM_GATEWAY_API_KEYS_FILE": __file__}, 1, "line 1: a key has"),
        (
            "gateway",
            {"TANDEM_GATEWAY_TLS_KEY_FILE": __file__, "TANDEM_GATEWAY_TLS_CERTIFICATE_FILE": __file__},
            1,
            "must be PEM",
        ),
        ("gateway", {"TANDEM_LOG_LEVEL": "LOUD"}, 2, "TANDEM_LOG_LEVEL"),
        ("draft_service", {"TANDEM_DRAFT_TLS_CLIENT_CA_FILE": __file__}, 2, "needs tls_certificate_file"),
    ],
)
def test_wrong_settings_are_one_line_that_names_them_and_no_traceback(
    module: str, variables: dict[str, str], code: int, said: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "TANDEM_DRAFT_METRICS_PORT": "0", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "LOUD" not in ended.stderr.replace("TANDEM_LOG_LEVEL", "")


def test_a_second_run_of_the_script_changes_nothing_and_a_missing_pair_is_made_again(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path / "made")
    before = {path.name: path.read_bytes() for path in made.folder.iterdir()}
    made.key("draft").unlink()
    subprocess.run([SCRIPT, made.folder, "example.org", "10.1.2.3", "::1"], check=True, capture_output=True)
    after = {path.name: path.read_bytes() for path in made.folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"draft.pem", "draft.key"}
    shown = subprocess.run(
        ["openssl", "x509", "-in", made.certificate("draft"), "-noout", "-ext", "subjectAltName"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert all(
        name in shown for name in ("DNS:draft", "DNS:localhost", "IP Address:127.0.0.1", "example.org", "10.1.2.3")
    )
    subprocess.run(
        ["openssl", "verify", "-CAfile", made.ca, made.certificate("draft")], check=True, capture_output=True
    )
    assert made.folder.stat().st_mode & 0o077 == 0
