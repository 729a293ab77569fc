"""Authority: makes the certificates that a cluster's nodes show each other. Its key never leaves its folder."""

import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from worker.config import is_certifiable
from worker.errors import ConfigError
from worker.node.identity import Role, file_name, split_pem, subjects_of, to_pem

AUTHORITY_FILE = "authority.key"  # of key and certificate; no node's file ends so
NODE_VALID = timedelta(days=365)
_AUTHORITY_VALID = timedelta(days=3650)
_CLOCKS_DIFFER = timedelta(days=1)  # of Macs whose batteries were empty, by a day at most


class Authority:
    """A key and the certificate that every node of one cluster trusts."""

    def __init__(self, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.folder = folder
        self.certificate = certificate
        self._key = key

    @classmethod
    def make(cls, folder: Path, *, replace: bool = False) -> "Authority":
        """A new one. In place of another it removes what that one has issued, which nobody will accept any more.

        Raises:
            ConfigError: there is one already and `replace` is not given.
        """
        path = folder / AUTHORITY_FILE
        if path.exists() and not replace:
            raise ConfigError(
                f"{path} is there already: to make a certificate, brigade keys issue NAME; to shut a node out, "
                "brigade keys init --replace, after which every node needs a new one"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"brigade {secrets.token_hex(4)}")])
        usage = x509.BasicConstraints(ca=True, path_length=0)
        now = datetime.now(UTC)
        builder = _builder(name, name, key, now - _CLOCKS_DIFFER, now + _AUTHORITY_VALID)
        certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
        authority = cls(folder, key, certificate)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in _issued(folder) if replace else ():
            file.unlink()
        _write_private(path, _private_pem(key) + to_pem(certificate))
        return authority

    @classmethod
    def open(cls, folder: Path) -> "Authority":
        """The one that is in this folder. Raises ConfigError if there is none, or a damaged one."""
        path = folder / AUTHORITY_FILE
        try:
            key_pem, certificate_pem = split_pem(path.read_bytes())
            key = load_pem_private_key(key_pem, password=None)
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except OSError as error:
            way_out = "brigade keys init makes one, on the Mac whose key stays there"
            raise ConfigError(f"{path} cannot be read: {error.strerror}; {way_out}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: expected a key and its certificate; brigade keys init --replace") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{path}: expected an elliptic curve key; brigade keys init --replace")
        return cls(folder, key, certificate)

    def issue(self, name: str, role: Role, *, begins: datetime | None = None, until: datetime | None = None) -> Path:
        """The file of a node, made or renewed; it is to be on that node, and nobody else's to read.

        Raises:
            ConfigError: no certificate can carry this name, or it is that of a node with another role, or of one whose
                name is spelled otherwise: a certificate cannot tell the two apart.
        """
        if not is_certifiable(name):
            raise ConfigError(f"expected a name like that of a host, as certificates carry it, found {name!r}")
        path = self.folder / file_name(name)
        _require_same(path, name, role)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        until = min(until or now + NODE_VALID, self.certificate.not_valid_after_utc)
        builder = _builder(subject, self.certificate.subject, key, begins or now - _CLOCKS_DIFFER, until)
        for extension in _extensions(name.lower(), role):
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        _write_private(path, _private_pem(key) + to_pem(certificate) + to_pem(self.certificate))
        return path


def _issued(folder: Path) -> list[Path]:
    """The files of nodes in this folder that its present authority has made; none if that one is damaged."""
    try:
        present = to_pem(Authority.open(folder).certificate)
    except ConfigError:
        return []
    return [file for file in folder.glob(file_name("*")) if split_pem(file.read_bytes())[2:] == [present]]


def _require_same(path: Path, name: str, role: Role) -> None:
    """Raise ConfigError if this file is another node's, or has another role: no renewal changes that unnoticed."""
    blocks = split_pem(path.read_bytes())[1:2] if path.exists() else []
    for block in blocks:
        try:
            certificate = x509.load_pem_x509_certificate(block)
            _, roles = subjects_of(certificate)
        except ValueError:
            return  # a damaged file says nothing of its node, and is as good as none
        spelled = [str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if spelled and name[:64] != spelled[0] and name[:64].lower() == spelled[0].lower():
            raise ConfigError(
                f"{path} is that of {spelled[0]!r}, and certificates do not tell {name!r} from it: renew it as "
                f"{spelled[0]!r}, remove that file first, or give another node a name that differs in more than case"
            )
        if roles and role not in roles:
            raise ConfigError(f"{path} has the role {', '.join(roles)}, not {role}; remove it first if that is meant")


def _extensions(name: str, role: Role) -> Iterator[x509.ExtensionType]:
    yield x509.SubjectAlternativeName([x509.DNSName(name), x509.UniformResourceIdentifier(role)])
    yield x509.BasicConstraints(ca=False, path_length=None)
    serves = [ExtendedKeyUsageOID.SERVER_AUTH] if role is Role.WORKER else []  # a coordinator only calls
    yield x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, *serves])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, begins: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(until)
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and nobody else's to read at any moment."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
