"""Files of keys: a wrong one is refused before any connection, and so are changed and odd ones, without a hang."""

import base64
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.deploy.authority import AUTHORITY_FILE, Authority
from tests.unit.fuzz import fuzzed, nearly, within
from worker.errors import ConfigError
from worker.node.certificates import KeyFile, Role, split_pem
from worker.node.network import Network

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "keys")


def keys_of(authority: Authority, name: str = "mini", role: Role = Role.WORKER) -> KeyFile:
    return KeyFile(authority.folder, name, role)


def issue(authority: Authority, **more: datetime) -> Path:
    return authority.issue("mini", Role.WORKER, **more)


def mixed(authority: Authority, which: int, other: Path) -> None:
    """The file of mini with one of its three parts from another file."""
    path = issue(authority)
    parts = split_pem(path.read_bytes())
    parts[which] = split_pem(other.read_bytes())[which]
    path.write_bytes(b"".join(parts))


def other_authority(authority: Authority) -> Authority:
    return Authority.make(authority.folder.with_name("other"))


PARTS = "expected a key, its certificate and the authority's, found "
WRONG: dict[str, tuple[Callable[[Authority], object], str]] = {
    "none": (lambda authority: None, "cannot be read: No such file or directory"),
    "readable by others": (
        lambda authority: issue(authority).chmod(0o640),
        "holds a private key and others may read it; chmod 600 ",
    ),
    "empty": (lambda authority: issue(authority).write_bytes(b""), f"{PARTS}0 readable parts"),
    "cut short": (lambda authority: os.truncate(issue(authority), 700), f"{PARTS}1 readable parts"),
    "no certificate inside": (
        lambda authority: mixed(authority, 1, authority.folder / "authority.key"),
        "found one of no node",
    ),
    "the key of another": (
        lambda authority: mixed(authority, 0, authority.issue("air", Role.WORKER)),
        "the key is not that of the certificate",
    ),
    "another authority": (
        lambda authority: mixed(authority, 2, other_authority(authority).issue("air", Role.WORKER)),
        "the certificate is not of the authority beside it",
    ),
    "another name": (
        lambda authority: authority.issue("air", Role.WORKER).rename(authority.folder / "mini.pem"),
        "expected a certificate of mini, found one of air",
    ),
    "another role": (
        lambda authority: authority.issue("mini", Role.COORDINATOR),
        "expected a certificate with the role brigade:worker, found brigade:coordinator",
    ),
    "expired": (
        lambda authority: issue(authority, begins=NOW - 2 * DAY, until=NOW - DAY),
        f"the certificate expired on {NOW - DAY:%Y-%m-%d}",
    ),
    "not valid yet": (
        lambda authority: issue(authority, begins=NOW + DAY),
        f"the certificate is not valid before {NOW + DAY:%Y-%m-%d}, and here it is ",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_ones_own_certificate_is_said_before_connecting(wrong: str, authority: Authority) -> None:
    make, message = WRONG[wrong]
    make(authority)
    keys = keys_of(authority)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(keys.path))}.*{re.escape(message)}"):
        Network(keys=keys).channel("air", "127.0.0.1:1")
    if wrong != "readable by others":
        with pytest.raises(ConfigError, match=r"; where the authority is: brigade keys issue mini, and copy that file"):
            keys.read()


def test_the_command_that_makes_an_authority_is_named_only_without_a_folder_of_keys(
    authority: Authority, tmp_path: Path
) -> None:
    for folder, is_named in ((authority.folder, False), (tmp_path / "none", True)):
        for role in Role:
            with pytest.raises(ConfigError, match="brigade keys issue mini") as refused:
                KeyFile(folder, "mini", role).read()
            assert ("brigade keys init; " in str(refused.value)) == is_named


def test_the_file_is_read_again_once_it_has_changed_and_case_does_not_count(authority: Authority) -> None:
    keys = keys_of(authority)
    authority.issue("Mini", Role.WORKER)
    first = keys.read()
    assert keys.read() is first
    authority.issue("Mini", Role.WORKER)
    assert keys.read() is not first and keys.read().certificate != first.certificate
    assert keys.read() == keys_of(authority).read()
    assert keys_of(authority, "MINI").read().certificate == keys.read().certificate
    with pytest.raises(ConfigError, match="brigade keys issue studio --coordinator"):
        keys_of(authority, "studio", Role.COORDINATOR).read()


def test_a_certificate_that_expires_later_is_refused(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return NOW + 366 * DAY

    keys = keys_of(authority)
    issue(authority)
    keys.read()
    monkeypatch.setattr("worker.node.certificates.datetime", Later)
    with pytest.raises(ConfigError, match="the certificate expired on"):
        keys.read()


@pytest.mark.parametrize(("days", "is_told"), [(365, False), (31, False), (29, True), (1, True)])
def test_the_end_of_a_certificate_is_told_once_in_thirty_days(days: int, is_told: bool, authority: Authority) -> None:
    until = NOW + days * DAY + timedelta(hours=1)
    issue(authority, until=until)
    told: list[str] = []
    network = Network(keys=keys_of(authority), warn=told.append)
    network.checked(keys_of(authority))
    network.checked(keys_of(authority))
    expected = f"the certificate of mini expires in {days} {'day' if days == 1 else 'days'}, on {until:%Y-%m-%d}; "
    assert told == ([f"{expected}where the authority is: brigade keys issue mini"] if is_told else [])


def test_a_file_that_is_there_and_cannot_be_opened_is_refused(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    issue(authority)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        keys_of(authority).read()


# Files at random, nearly right or extreme: an identity, or a ConfigError


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("fuzzed") / "keys")


@pytest.fixture(scope="module")
def sound(common: Authority) -> bytes:
    return issue(common).read_bytes()


def write(authority: Authority, content: bytes) -> None:
    path = authority.folder / "mini.pem"
    path.write_bytes(content)
    path.chmod(0o600)


def read_or_refused(authority: Authority, content: bytes) -> None:
    write(authority, content)
    try:
        keys_of(authority).read()
    except ConfigError as error:
        assert len(str(error)) < 1000


def der_of(pem: bytes) -> bytes:
    return base64.b64decode(b"".join(pem.splitlines()[1:-1]))


def with_der(pem: bytes, der: bytes) -> bytes:
    """The same PEM around other bytes."""
    head, *_, tail = pem.splitlines()
    return b"\n".join([head, base64.encodebytes(der).strip(), tail, b""])


@fuzzed(20)
@given(data=st.data())
def test_fuzz_a_file_that_was_changed_is_read_or_refused(common: Authority, sound: bytes, data: st.DataObject) -> None:
    read_or_refused(common, data.draw(nearly(sound) | st.binary(max_size=60)))


@fuzzed(60)
@given(data=st.data())
def test_fuzz_a_changed_certificate_is_read_or_refused(common: Authority, sound: bytes, data: st.DataObject) -> None:
    """Right base64 of wrong bytes: the parsers behind see them."""
    parts = split_pem(sound)
    which = data.draw(st.integers(0, 2))
    der = der_of(parts[which])
    at, byte = data.draw(st.integers(0, len(der) - 1)), data.draw(st.integers(0, 255))
    changed = data.draw(st.just(der[:at] + bytes([byte]) + der[at + 1 :]) | nearly(der))
    parts[which] = with_der(parts[which], changed)
    read_or_refused(common, b"".join(parts))


@pytest.mark.parametrize(
    "change",
    [(b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x00\x86\x48\xce\x3d\x03\x01\x07"), (b"\x42\x00\x04", b"\x42\x01\x04")],
    ids=["curve", "point"],
)
def test_a_certificate_of_an_odd_key_is_refused(common: Authority, sound: bytes, change: tuple[bytes, bytes]) -> None:
    key, certificate, issuer = split_pem(sound)
    der = der_of(certificate)
    assert change[0] in der
    write(common, key + with_der(certificate, der.replace(*change)) + issuer)
    with pytest.raises(ConfigError, match=r"mini\.pem: "):
        keys_of(common).read()


LONG: dict[str, Callable[[bytes], bytes]] = {
    "begins": lambda sound: b"-----BEGIN A-----\n" * (1 << 18),
    "one begin": lambda sound: b"-----BEGIN A-----\n" + b"A" * (1 << 22),
    "spaces": lambda sound: b"-----BEGIN " + b" " * (1 << 22),
    "names": lambda sound: b"-----BEGIN " * (1 << 18),
    "twice": lambda sound: sound * 1000,
}


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
def test_long_files_are_refused_cheaply(common: Authority, sound: bytes, make: Callable[[bytes], bytes]) -> None:
    write(common, make(sound))
    with within(1 << 20), pytest.raises(ConfigError, match="expected a key, its certificate"):
        keys_of(common).read()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused(authority: Authority, kind: str) -> None:
    path = authority.folder / f"{kind}.pem"
    os.mkfifo(path, 0o600) if kind == "pipe" else path.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=re.escape(f"{path} ")):
        keys_of(authority, kind).read()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_damaged_file_can_be_issued_anew(common: Authority, sound: bytes, part: int) -> None:
    for damage in (lambda text: text[: len(text) // 2] + text[len(text) // 2 + 4 :], lambda text: b""):
        parts = split_pem(sound)
        parts[part] = damage(parts[part])
        write(common, b"".join(parts))
        issue(common)
        keys_of(common).read()


def test_no_authority_and_a_damaged_one_are_refused(common: Authority, tmp_path: Path) -> None:
    sound = (common.folder / AUTHORITY_FILE).read_bytes()
    with pytest.raises(ConfigError, match="brigade keys init makes one"):
        Authority.open(tmp_path)
    for content in (b"", sound[:200], sound[:-80], b"\xff" * 500, sound.replace(b"M", b"N"), b"x"):
        (tmp_path / AUTHORITY_FILE).write_bytes(content)
        with pytest.raises(ConfigError):
            Authority.open(tmp_path)
