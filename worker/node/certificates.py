"""A node's identity: its certificate, its private key, and the authority whose certificates it accepts.

All three are in one file, NAME.pem in the folder of keys, so that a renewal replaces a single file.
"""

import os
import re
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from worker.errors import ConfigError
from worker.platform.text import counted

_MOST_BYTES = 1 << 16  # of a key file
_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n[^-]+-----END \1-----\n?")
WARN_AHEAD = timedelta(days=30)
_YEAR_10000 = 253402300800  # Python's dates end before it


class Role(StrEnum):
    """The role that a certificate gives a node; its value is a URI in the certificate."""

    COORDINATOR = "brigade:coordinator"
    WORKER = "brigade:worker"

    def issue_hint(self, name: str) -> str:
        """Return how the user gets a certificate of this role."""
        option = " --coordinator" if self is Role.COORDINATOR else ""
        return f"where the authority is: brigade keys issue {name}{option}"


@dataclass(frozen=True)
class Identity:
    """A key, its certificate and the authority's certificate as PEM; `until` is the earlier expiry of both."""

    name: str
    role: Role
    key: bytes
    certificate: bytes
    authority: bytes
    until: datetime


def expiry_warning(name: str, role: Role, until: datetime, fix: str = "") -> str:
    """Return a line about a certificate that expires soon, with what to do, else an empty string."""
    left = until - datetime.now(UTC)
    if left > WARN_AHEAD:
        return ""
    when = f"in {counted(left.days, 'day')}, on {until:%Y-%m-%d}"
    return f"the certificate of {name} expires {when}; {fix or role.issue_hint(name)}"


def reported_expiry(seconds: int) -> datetime | None:
    """Return the expiry that a node reports in seconds since 1970; None for 0 or an impossible number."""
    return datetime.fromtimestamp(seconds, UTC) if 0 < seconds < _YEAR_10000 else None


class KeyFile:
    """One node's file in a folder of keys, read again whenever it changes."""

    def __init__(self, folder: Path, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.path = folder / file_name(name)
        self._known: tuple[tuple[int, ...], Identity] | None = None  # of a version of the file; any thread reads it

    def read(self) -> Identity:
        """Return the identity in the file.

        Raises:
            ConfigError: the file is missing, readable by others, damaged, for another node or role, not issued by the
                authority in it, or not valid now.
        """
        version, known = self._stat(), self._known
        if known is None or known[0] != version:
            self._known = known = version, self._load()
        identity = known[1]
        if identity.until <= datetime.now(UTC):
            raise self._wrong(f"the certificate expired on {identity.until:%Y-%m-%d}")
        return identity

    def _stat(self) -> tuple[int, ...]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{self.path} is no file; {self._way_out}")
        if os.name == "posix" and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{self.path} holds a private key and others may read it; chmod 600 {self.path}")
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _load(self) -> Identity:
        try:
            with self.path.open("rb") as file:
                parts = split_pem(file.read(_MOST_BYTES))
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            key_pem, certificate_pem, authority_pem = parts
            key = load_pem_private_key(key_pem, password=None)
            certificate, authority = map(x509.load_pem_x509_certificate, (certificate_pem, authority_pem))
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            found = f"expected a key, its certificate and the authority's, found {len(parts)} readable parts"
            raise ConfigError(f"{self.path}: {found}; {self._way_out}") from error
        self._check(key, certificate, authority)
        until = min(certificate.not_valid_after_utc, authority.not_valid_after_utc)
        return Identity(self.name, self.role, key_pem, certificate_pem, authority_pem, until)

    def _check(self, key: PrivateKeyTypes, certificate: x509.Certificate, authority: x509.Certificate) -> None:
        names, roles = subjects_of(certificate)
        if names != [self.name.lower()]:
            raise self._wrong(
                f"expected a certificate of {self.name.lower()}, found one of {', '.join(names) or 'no node'}"
            )
        if roles != [self.role]:
            raise self._wrong(f"expected a certificate with the role {self.role}, found {', '.join(roles) or 'none'}")
        try:
            is_its_key = key.public_key() == certificate.public_key()
        except (ValueError, UnsupportedAlgorithm):
            is_its_key = False
        if not is_its_key:
            raise self._wrong("the key is not that of the certificate")
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            raise self._wrong("the certificate is not of the authority beside it") from None
        now = datetime.now(UTC)
        if (begins := certificate.not_valid_before_utc) > now:
            raise self._wrong(f"the certificate is not valid before {begins:%Y-%m-%d}, and here it is {now:%Y-%m-%d}")

    def _unreadable(self, error: OSError) -> ConfigError:
        first = "" if self.path.parent.exists() else "make an authority, if there is none: brigade keys init; "
        return ConfigError(f"{self.path} cannot be read: {error.strerror}; {first}{self._way_out}")

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}; {self._way_out}")

    @property
    def _way_out(self) -> str:
        return f"{self.role.issue_hint(self.name)}, and copy that file here"


def file_name(name: str) -> str:
    """Return the name of a node's file in the folder of keys. Names in certificates are case-insensitive."""
    return f"{name.lower()}.pem"


def split_pem(text: bytes) -> list[bytes]:
    """Return the PEM blocks of a file."""
    return [match[0] for match in _PEM.finditer(text)]


def to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def subjects_of(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    """Return the names and the roles in a certificate."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return [], []
    return found.get_values_for_type(x509.DNSName), found.get_values_for_type(x509.UniformResourceIdentifier)
