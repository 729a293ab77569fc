"""`brigade serve` over TLS, with keys: who is let in, who trusts it, and what stays unknown."""

import re
import signal
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.cluster.commands import run_here
from tests.cluster.processes import Starter
from tests.cluster.servers import start_server


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1's own, and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    return folder / "cert.pem", folder / "key.pem"


def test_keys_let_in_over_tls_every_command_trusts_one_variable_and_keys_stay_unknown(
    start: Starter, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nalice key-of-alice\nkey-of-bob\n")
    keys.chmod(0o644)
    cert, key = write_certificate(tmp_path)
    server = start_server(
        start, talker, "--local", "0", "--host", "0.0.0.0", "--api-key-file", keys, "--tls-cert", cert, "--tls-key", key
    )
    assert re.search(rf"warning: {keys} can be read by other users of this machine", server.running.err.text)
    assert "travel in clear" not in server.running.err.text
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    with httpx2.Client(base_url=url, verify=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        for header in ({"Authorization": "Bearer key-of-alice"}, {"x-api-key": "key-of-bob"}):
            assert client.get("/v1/models", headers=header).status_code == 200
    place = ("--server", url, "--api-key-file", keys)
    for command, typed in ((("status",), ""), (("generate", "-m", "2", "Hi"), ""), (("chat", "-m", "2"), "Hi\n")):
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        outcome = run_here(*command, *place, stdin=typed)
        assert outcome.code == 3 and "let SSL_CERT_FILE name its PEM file" in outcome.err, outcome.err
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        outcome = run_here(*command, *place, stdin=typed)
        assert outcome.code == 0 and outcome.out, outcome.err
    elsewhere = run_here("status", "--server", url.replace("127.0.0.1", "localhost"))
    assert elsewhere.code == 3 and "by a name that its certificate has" in elsewhere.err
    server.running.send_signal(signal.SIGINT)
    outcome = server.running.wait()
    assert outcome.code == 0 and "key-of" not in outcome.err + outcome.out
