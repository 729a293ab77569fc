"""A node's own certificate: what is wrong with it is said before anybody else sees it."""

import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.deploy.authority import Authority
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


def mixed(authority: Authority, which: int, other: Path) -> None:
    """The file of mini with one of its three parts from another file."""
    path = authority.issue("mini", Role.WORKER)
    parts, others = split_pem(path.read_bytes()), split_pem(other.read_bytes())
    path.write_bytes(b"".join(others[i] if i == which else part for i, part in enumerate(parts)))


WRONG: dict[str, tuple[Callable[[Authority], object], str]] = {
    "none": (lambda authority: None, "cannot be read: No such file or directory"),
    "readable by others": (
        lambda authority: authority.issue("mini", Role.WORKER).chmod(0o640),
        "holds a private key and others may read it: chmod 600 ",
    ),
    "empty": (
        lambda authority: authority.issue("mini", Role.WORKER).write_bytes(b""),
        "expected a key, its certificate and the authority's, found 0 readable parts",
    ),
    "cut short": (
        lambda authority: os.truncate(authority.issue("mini", Role.WORKER), 700),
        "expected a key, its certificate and the authority's, found 1 readable parts",
    ),
    "no certificate inside": (
        lambda authority: mixed(authority, 1, authority.folder / "authority.key"),
        "found one of no node",
    ),
    "the key of another": (
        lambda authority: mixed(authority, 0, authority.issue("air", Role.WORKER)),
        "the key is not that of the certificate",
    ),
    "another authority": (
        lambda authority: mixed(
            authority, 2, Authority.make(authority.folder.with_name("other")).issue("air", Role.WORKER)
        ),
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
        lambda authority: authority.issue("mini", Role.WORKER, begins=NOW - 2 * DAY, until=NOW - DAY),
        f"the certificate expired on {NOW - DAY:%Y-%m-%d}",
    ),
    "not valid yet": (
        lambda authority: authority.issue("mini", Role.WORKER, begins=NOW + DAY),
        f"the certificate is not valid before {NOW + DAY:%Y-%m-%d}, and here it is {NOW:%Y-%m-%d}",
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


def test_the_file_is_read_again_only_once_it_has_changed_and_names_in_capitals_are_the_same(
    authority: Authority,
) -> None:
    keys = keys_of(authority)
    authority.issue("Mini", Role.WORKER)
    first = keys.read()
    assert keys.read() is first
    authority.issue("Mini", Role.WORKER)
    assert keys.read() is not first and keys.read().certificate != first.certificate
    assert keys.read() == KeyFile(authority.folder, "mini", Role.WORKER).read()
    assert keys_of(authority, "MINI").read().certificate == keys.read().certificate
    with pytest.raises(ConfigError, match="brigade keys issue studio --coordinator"):
        keys_of(authority, "studio", Role.COORDINATOR).read()


def test_a_certificate_that_was_valid_when_it_was_read_is_refused_once_it_has_expired(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(authority)
    authority.issue("mini", Role.WORKER)
    keys.read()

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return NOW + 366 * DAY

    monkeypatch.setattr("worker.node.certificates.datetime", Later)
    with pytest.raises(ConfigError, match="the certificate expired on"):
        keys.read()


@pytest.mark.parametrize(("days", "is_told"), [(365, False), (31, False), (29, True), (1, True)])
def test_the_end_of_a_certificate_is_told_thirty_days_ahead_and_once(
    days: int, is_told: bool, authority: Authority
) -> None:
    until = NOW + days * DAY + timedelta(hours=1)
    authority.issue("mini", Role.WORKER, until=until)
    told: list[str] = []
    network = Network(keys=keys_of(authority), warn=told.append)
    network._checked(keys_of(authority))
    network._checked(keys_of(authority))
    way_out = "where the authority is: brigade keys issue mini"
    expected = f"the certificate of mini expires in {days} days, on {until:%Y-%m-%d}; {way_out}"
    assert told == ([expected] if is_told else [])
