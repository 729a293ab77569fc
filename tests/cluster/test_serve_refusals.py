"""What `brigade serve` does not begin with: one line on standard error and the exit code; keys that stay unknown."""

import re
import signal
import socket
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


def command(talker: Path, *flags: str | Path) -> tuple[str | Path, ...]:
    """The usual flags, but for those that are given."""
    usual = {"--model": talker, "--local": "0", "--port": "0"}
    return ("serve", *(each for flag in usual.items() if flag[0] not in flags for each in flag), *flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model {nowhere}", "model folder {nowhere} does not exist"),
        ("--context 1", "'--context'"),
        ("--temp -1", "--temp: "),
        ("--host 0.0.0.0", "--host: 0.0.0.0 can be reached by others: expected --api-key-file with it"),
        ("--tls-cert {keys}", "--tls-cert: "),
        ("--tls-cert {keys} --tls-key {nowhere}", "--tls-key: "),
        ("--tls-cert {keys} --tls-key {keys}", "--tls-cert: "),
        ("--api-key-file {nowhere}", "--api-key-file: "),
        ("--api-key-file {short}", "--api-key-file: {short}, line 1: "),
        ("--cors-origin nope", "--cors-origin: "),
        ("--port 70000", "'--port'"),
        ("--port {taken}", "cannot listen on 127.0.0.1:{taken}: "),
        ("--layers 1,2", "layers: "),
    ],
)
def test_wrong_flags_are_refused_in_one_line(flags: str, said: str, talker: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice 0123456789\n")
    (tmp_path / "short").write_text("0123\n")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        places = {name: str(tmp_path / name) for name in ("nowhere", "keys", "short")}
        places["taken"] = str(other.getsockname()[1])
        outcome = run_here(*command(talker, *flags.format(**places).split()))
    assert outcome.code == 2 and outcome.out == ""
    [line] = [line for line in outcome.err.splitlines() if not line.startswith("warning: ")]
    assert line.startswith("error: ") and said.format(**places) in line
    assert "{taken}" not in flags or line.endswith("in use; give another --port or --host")


def test_keys_let_in_over_tls_and_stay_unknown_to_others(
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
    require_trust_by_hand(url, keys, cert, monkeypatch)
    server.running.send_signal(signal.SIGINT)
    outcome = server.running.wait()
    assert outcome.code == 0
    assert "key-of" not in outcome.err + outcome.out


def require_trust_by_hand(url: str, keys: Path, cert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command trusts the certificate by the same variable, and without it says so."""
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


def test_a_server_that_is_told_to_stop_before_it_answers_ends_well(start: Starter, talker: Path) -> None:
    running = start.brigade(*command(talker, "--local", "1"))
    start.children(running, 2)  # one of them renders chat templates
    running.process.terminate()
    outcome = running.wait()
    assert outcome.code == 0 and "Traceback" not in outcome.err


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """One of 127.0.0.1's own."""
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
