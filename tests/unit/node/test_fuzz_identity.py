"""Files of keys at random, nearly right or extreme: an identity, or a ConfigError; no hang."""

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.deploy.authority import AUTHORITY_FILE, Authority
from tests.unit.fuzz import fuzzed, nearly, within
from worker.errors import ConfigError
from worker.node.certificates import KeyFile, Role, split_pem


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("fuzzed") / "keys")


@pytest.fixture(scope="module")
def sound(authority: Authority) -> bytes:
    return authority.issue("mini", Role.WORKER).read_bytes()


def read(authority: Authority, content: bytes) -> None:
    """The file as the node's own, and as that of a node whose certificate is to be renewed."""
    path = authority.folder / "mini.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    try:
        KeyFile(authority.folder, "mini", Role.WORKER).read()
    except ConfigError as error:
        assert len(str(error)) < 1000


@fuzzed(20)
@given(data=st.data())
def test_a_file_that_was_changed_is_read_or_refused(authority: Authority, sound: bytes, data: st.DataObject) -> None:
    read(authority, data.draw(nearly(sound) | st.binary(max_size=60)))


@fuzzed(60)
@given(data=st.data())
def test_a_certificate_whose_inside_was_changed_is_read_or_refused(
    authority: Authority, sound: bytes, data: st.DataObject
) -> None:
    """Right base64 of wrong bytes: the parsers behind see them."""
    parts = split_pem(sound)
    which = data.draw(st.integers(0, 2))
    der = base64.b64decode(b"".join(parts[which].splitlines()[1:-1]))
    at, byte = data.draw(st.integers(0, len(der) - 1)), data.draw(st.integers(0, 255))
    changed = data.draw(st.just(der[:at] + bytes([byte]) + der[at + 1 :]) | nearly(der))
    head, tail = parts[which].splitlines()[:: len(parts[which].splitlines()) - 1]
    parts[which] = b"\n".join([head, base64.encodebytes(changed).strip(), tail, b""])
    read(authority, b"".join(parts))


@pytest.mark.parametrize(
    "change",
    [(b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x00\x86\x48\xce\x3d\x03\x01\x07"), (b"\x42\x00\x04", b"\x42\x01\x04")],
    ids=["curve", "point"],
)
def test_a_certificate_whose_key_cannot_be_read_is_refused(
    authority: Authority, sound: bytes, change: tuple[bytes, bytes]
) -> None:
    key, certificate, issuer = split_pem(sound)
    head, *inside, tail = certificate.splitlines()
    der = base64.b64decode(b"".join(inside))
    assert change[0] in der
    changed = b"\n".join([head, base64.encodebytes(der.replace(*change)).strip(), tail, b""])
    path = authority.folder / "mini.pem"
    path.write_bytes(key + changed + issuer)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"mini\.pem: "):
        KeyFile(authority.folder, "mini", Role.WORKER).read()


LONG: dict[str, Callable[[bytes], bytes]] = {
    "begins": lambda sound: b"-----BEGIN A-----\n" * (1 << 18),
    "one begin": lambda sound: b"-----BEGIN A-----\n" + b"A" * (1 << 22),
    "spaces": lambda sound: b"-----BEGIN " + b" " * (1 << 22),
    "names": lambda sound: b"-----BEGIN " * (1 << 18),
    "twice": lambda sound: sound * 1000,
}


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
def test_a_long_file_is_refused_in_little_memory(
    authority: Authority, sound: bytes, make: Callable[[bytes], bytes]
) -> None:
    path = authority.folder / "mini.pem"
    path.write_bytes(make(sound))
    path.chmod(0o600)
    with within(1 << 20), pytest.raises(ConfigError, match="expected a key, its certificate"):
        KeyFile(authority.folder, "mini", Role.WORKER).read()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused(authority: Authority, kind: str) -> None:
    path = authority.folder / f"{kind}.pem"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=re.escape(f"{path} ")):
        KeyFile(authority.folder, kind, Role.WORKER).read()
    path.unlink() if kind == "pipe" else path.rmdir()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_damaged_file_can_be_issued_anew(authority: Authority, sound: bytes, part: int) -> None:
    path = authority.folder / "mini.pem"
    for damage in (lambda text: text[: len(text) // 2] + text[len(text) // 2 + 4 :], lambda text: b""):
        parts = split_pem(sound)
        parts[part] = damage(parts[part])
        path.write_bytes(b"".join(parts))
        authority.issue("mini", Role.WORKER)
        KeyFile(authority.folder, "mini", Role.WORKER).read()


def test_a_damaged_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    sound = (authority.folder / AUTHORITY_FILE).read_bytes()
    for content in (b"", sound[:200], sound[:-80], b"\xff" * 500, sound.replace(b"M", b"N")):
        (tmp_path / AUTHORITY_FILE).write_bytes(content)
        with pytest.raises(ConfigError):
            Authority.open(tmp_path)
