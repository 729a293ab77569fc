"""Certificates: a cluster's authority, which issues them, and the files that a launch sends to its workers.

The authority's key never leaves its folder.
"""

import fcntl
import os
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from worker.config import ClusterConfig, is_certifiable
from worker.errors import ConfigError
from worker.node.certificates import WARN_AHEAD, KeyFile, Role, file_name, split_pem, subjects_of, to_pem
from worker.platform.files import private_file, sync_file

AUTHORITY_FILE = "authority.key"  # key and certificate; nodes' files end with .pem
NODE_VALID = timedelta(days=365)
AUTHORITY_VALID = timedelta(days=3650)
_CLOCK_ERROR = timedelta(days=1)  # at most, after a battery was empty


class Authority:
    """A key and the certificate that every node of one cluster trusts."""

    def __init__(self, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.folder = folder
        self.certificate = certificate
        self._key = key

    @classmethod
    def make(cls, folder: Path, coordinator: str = "", *, replace: bool = False) -> "Authority":
        """Make a new authority. If it replaces another one, delete the certificates that it issued.

        Args:
            coordinator: the name of the node whose file tells the authority where its own file is missing or damaged.
        Raises:
            ConfigError: one exists already, or the coordinator's file, and `replace` is not given.
            OSError: a node's file cannot be read; nothing has changed.
        """
        path, own = folder / AUTHORITY_FILE, folder / file_name(coordinator)
        if path.exists() and not replace:
            raise ConfigError(
                f"{path} exists already: to make a certificate, brigade keys issue NAME; to shut a node out, "
                "brigade keys init --replace, after which every node needs a new one"
            )
        if own.exists() and not replace:
            raise ConfigError(
                f"expected no certificate where there is no {AUTHORITY_FILE}, found {own}: run brigade keys on the Mac "
                "that keeps the key, or brigade keys init --replace, after which every node needs a new one"
            )
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"brigade {secrets.token_hex(4)}")])
        builder = _builder(name, name, key, now - _CLOCK_ERROR, now + AUTHORITY_VALID)
        usage = x509.BasicConstraints(ca=True, path_length=0)
        certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"expected {folder} to be a folder for keys, found a file") from None
        issued = _issued(folder, own) if replace else []
        _write_private(path, key, certificate)
        for file in issued:
            file.unlink()
        return cls(folder, key, certificate)

    @classmethod
    def open(cls, folder: Path) -> "Authority":
        """Open the authority in this folder. Raises ConfigError if there is none, or a damaged one."""
        path = folder / AUTHORITY_FILE
        try:
            key_pem, certificate_pem = split_pem(path.read_bytes())
            key = load_pem_private_key(key_pem, password=None)
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            fix = "; brigade keys init makes one, on the Mac that keeps its key" if is_missing else ""
            raise ConfigError(f"{path} cannot be read: {error.strerror}{fix}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: expected a key and its certificate; brigade keys init --replace") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{path}: expected an elliptic curve key; brigade keys init --replace")
        return cls(folder, key, certificate)

    def issue(self, name: str, role: Role, *, begins: datetime | None = None, until: datetime | None = None) -> Path:
        """Make or renew a node's file, which belongs on that node and must be readable by its user only.

        Args:
            begins, until: when it is valid; by default from a day ago for NODE_VALID.
        Raises:
            ConfigError: no certificate can carry this name, or the existing file has another role, or its name
                differs in case only, which certificates ignore; or the authority has expired.
        """
        require_certifiable(name)
        path = self.folder / file_name(name)
        _require_same(path, name, role)
        last, now = self.certificate.not_valid_after_utc, datetime.now(UTC)
        if last <= now:
            raise ConfigError(f"the authority in {self.folder} expired on {last:%Y-%m-%d}; brigade keys init --replace")
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        until = min(until or now + NODE_VALID, last)
        builder = _builder(subject, self.certificate.subject, key, begins or now - _CLOCK_ERROR, until)
        serves = [ExtendedKeyUsageOID.SERVER_AUTH] if role is Role.WORKER else []  # a coordinator only calls
        for extension in (
            x509.SubjectAlternativeName([x509.DNSName(name.lower()), x509.UniformResourceIdentifier(role)]),
            x509.BasicConstraints(ca=False, path_length=None),
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, *serves]),
        ):
            builder = builder.add_extension(extension, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        _write_private(path, key, certificate, self.certificate)
        return path

    def has_issued(self, path: Path) -> bool:
        """Return whether this node's file exists and is of this authority."""
        return path.exists() and split_pem(path.read_bytes())[2:] == [to_pem(self.certificate)]


def require_certifiable(name: str) -> None:
    """Raise ConfigError for a node's name that no certificate can carry."""
    if not is_certifiable(name):
        raise ConfigError(f"expected a name like that of a host, as certificates carry it, found {name!r}")


def _issued(folder: Path, own: Path) -> list[Path]:
    """Return the node files of the authority in this folder, or of that of the file `own` if it cannot be opened."""
    try:
        issuer = [to_pem(Authority.open(folder).certificate)]
    except ConfigError:
        issuer = split_pem(own.read_bytes())[2:] if own.exists() else []
    return [file for file in folder.glob(file_name("*")) if issuer and split_pem(file.read_bytes())[2:] == issuer]


def _require_same(path: Path, name: str, role: Role) -> None:
    """Raise ConfigError if renewing this file would change its node or its role; a damaged file may be replaced."""
    blocks = split_pem(path.read_bytes())[1:2] if path.exists() else []
    for block in blocks:
        try:
            certificate = x509.load_pem_x509_certificate(block)
            _, roles = subjects_of(certificate)
        except ValueError:
            return
        spelled = [str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if spelled and name[:64] != spelled[0] and name[:64].lower() == spelled[0].lower():
            raise ConfigError(
                f"{path} belongs to {spelled[0]!r}, and certificates ignore the case of {name!r}: renew it as "
                f"{spelled[0]!r}, remove that file first, or give another node a name that differs in more than case"
            )
        if roles and role not in roles:
            how = "with" if role is Role.WORKER else "without"
            found = f"{path} has the role {', '.join(roles)}, not {role}"
            raise ConfigError(f"{found}: renew it {how} --coordinator, or remove it first if you mean that")


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


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, *certificates: x509.Certificate) -> None:
    """Write a file atomically that only its owner can ever read."""
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    content += b"".join(map(to_pem, certificates))
    try:
        with private_file(path) as file:
            file.write(content)
            file.flush()
            sync_file(file.fileno())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def certificates(cluster: ClusterConfig, names: Sequence[str], say: Callable[[str], None]) -> dict[str, bytes]:
    """Return the certificate files of these workers by name; {} without encryption.

    Make those that are missing or unusable, or of an authority that was replaced by that of the coordinator's own file.

    Raises:
        ConfigError: one is unusable, or is missing and cannot be made here.
    """
    if cluster.tls is None:
        return {}
    folder = Path(cluster.tls.keys)
    authority = Authority.open(folder) if (folder / AUTHORITY_FILE).exists() else None
    own = folder / file_name(cluster.coordinator.name)
    if authority is not None and own.exists() and not authority.has_issued(own):
        if lacking := [name for name in names if not (folder / file_name(name)).exists()]:
            raise ConfigError(
                f"{file_name(lacking[0])} is missing in {folder}, whose authority did not issue {own.name}; copy it "
                f"from where that was made (brigade keys issue {lacking[0]}), or make all anew: brigade keys init "
                "--replace"
            )
        authority = None  # the files are of another one
    found = {}
    for name in names:
        path = folder / file_name(name)
        if authority is not None or not path.exists():
            _issue_if_needed(authority or Authority.open(folder), name, say)
        KeyFile(folder, name, Role.WORKER).read()
        found[name] = path.read_bytes()
    return found


def _issue_if_needed(authority: Authority, name: str, say: Callable[[str], None]) -> None:
    """Make a worker's certificate file, unless this authority has issued one already that does not expire soon."""
    lock = os.open(authority.folder, os.O_RDONLY)  # only one of several launches makes it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file, why = KeyFile(authority.folder, name, Role.WORKER), ""
        try:
            if authority.has_issued(file.path):
                until, last = file.read().until, authority.certificate.not_valid_after_utc
                if until >= min(datetime.now(UTC) + WARN_AHEAD, last):  # none outlasts the authority
                    return
                why = f"; the last one expires on {until:%Y-%m-%d}"
        except ConfigError as error:
            why = f"; the last one: {error.message.partition(';')[0]}"
        say(f"made {authority.issue(name, Role.WORKER)}, the certificate of {name}{why}")
    finally:
        os.close(lock)
