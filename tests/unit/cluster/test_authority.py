"""The authority: what it issues, where its key is, and that a second one is never made by mistake."""

import errno
import os
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.deploy.authority import AUTHORITY_FILE, Authority, certificates
from worker.config import ClusterConfig, TlsConfig
from worker.errors import ConfigError
from worker.node.certificates import KeyFile, Role, split_pem


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "keys")


def test_a_certificate_carries_a_name_and_a_role_for_a_year_and_issues_no_other(authority: Authority) -> None:
    now = datetime.now(UTC)
    path = authority.issue("Mini", Role.WORKER)
    assert path.name == "mini.pem"
    certificate = x509.load_pem_x509_certificate(split_pem(path.read_bytes())[1])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert list(names) == [x509.DNSName("mini"), x509.UniformResourceIdentifier("brigade:worker")]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    keys = KeyFile(path.parent, "mini", Role.WORKER)
    assert timedelta(days=364) < keys.read().until - now < timedelta(days=366)
    authority.issue("Mini", Role.WORKER, until=now + timedelta(days=9999))
    assert keys.read().until == authority.certificate.not_valid_after_utc, "none outlasts the authority"


def test_an_authority_that_has_expired_issues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.deploy.authority.AUTHORITY_VALID", timedelta(hours=-1))
    authority = Authority.make(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"expired on 20\d\d-.*keys init --replace"):
        authority.issue("mini", Role.WORKER)
    assert [file.name for file in authority.folder.iterdir()] == [AUTHORITY_FILE]


def test_keys_are_for_their_user_only_and_the_authoritys_key_is_in_no_nodes_file(authority: Authority) -> None:
    path = authority.issue("mini", Role.WORKER)
    for file in (path, authority.folder / AUTHORITY_FILE):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(authority.folder.stat().st_mode) == 0o700
    assert split_pem((authority.folder / AUTHORITY_FILE).read_bytes())[0] not in path.read_bytes()
    assert sorted(file.name for file in authority.folder.iterdir()) == [AUTHORITY_FILE, "mini.pem"]


def test_an_authority_is_not_made_twice_and_the_first_one_stays(authority: Authority) -> None:
    before = (authority.folder / AUTHORITY_FILE).read_bytes()
    with pytest.raises(ConfigError, match=r"authority\.key exists already: .*--replace"):
        Authority.make(authority.folder)
    assert (authority.folder / AUTHORITY_FILE).read_bytes() == before


def test_replacing_an_authority_removes_what_it_issued_and_nothing_else(authority: Authority) -> None:
    authority.issue("mini", Role.WORKER)
    foreign = Authority.make(authority.folder.with_name("other")).issue("air", Role.WORKER)
    foreign.rename(authority.folder / "air.pem")
    (authority.folder / "notes.pem").write_text("mine")
    renewed = Authority.make(authority.folder, replace=True)
    assert sorted(file.name for file in authority.folder.iterdir()) == ["air.pem", AUTHORITY_FILE, "notes.pem"]
    assert Authority.open(authority.folder).certificate == renewed.certificate != authority.certificate


def test_a_coordinator_s_certificate_is_not_replaced_by_that_of_an_authority_made_beside_it(
    authority: Authority,
) -> None:
    own = authority.issue("studio", Role.COORDINATOR)
    (authority.folder / AUTHORITY_FILE).unlink()  # or the file was copied to another Mac
    before = own.read_bytes()
    with pytest.raises(ConfigError, match=r"found \S*studio\.pem: .*--replace"):
        Authority.make(authority.folder, "studio")
    assert [file.name for file in authority.folder.iterdir()] == ["studio.pem"] and own.read_bytes() == before


@pytest.mark.parametrize("content", [None, b"", b"damaged"])
def test_what_a_damaged_authority_issued_is_known_by_the_coordinator_s_file(
    authority: Authority, content: bytes | None
) -> None:
    authority.issue("studio", Role.COORDINATOR)
    authority.issue("mini", Role.WORKER)
    foreign = Authority.make(authority.folder.with_name("other")).issue("air", Role.WORKER)
    foreign.rename(authority.folder / "air.pem")
    if content is None:
        (authority.folder / AUTHORITY_FILE).unlink()
    else:
        (authority.folder / AUTHORITY_FILE).write_bytes(content)
    Authority.make(authority.folder, "studio", replace=True)
    assert sorted(file.name for file in authority.folder.iterdir()) == ["air.pem", AUTHORITY_FILE]


def test_an_authority_that_cannot_be_replaced_keeps_the_certificates_that_it_issued(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("air", "mini"):
        authority.issue(name, Role.WORKER)
    before = {file.name: file.read_bytes() for file in authority.folder.iterdir()}
    unreadable = authority.folder / "folder.pem"
    unreadable.mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.pem"):
        Authority.make(authority.folder, replace=True)
    unreadable.rmdir()
    monkeypatch.setattr("coordinator.deploy.authority.sync_file", failing)
    with pytest.raises(ConfigError, match="cannot write"):
        Authority.make(authority.folder, replace=True)
    assert {file.name: file.read_bytes() for file in authority.folder.iterdir()} == before


def failing(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_launch_sends_no_certificate_of_an_authority_whose_key_was_lost(authority: Authority) -> None:
    cluster, said = ClusterConfig(tls=TlsConfig(keys=str(authority.folder))), list[str]()
    first = certificates(cluster, ["mini"], said.append)
    assert certificates(cluster, ["mini"], said.append) == first and len(said) == 1
    (authority.folder / AUTHORITY_FILE).unlink()
    assert certificates(cluster, ["mini"], said.append) == first, "a folder without an authority's key keeps its files"
    renewed = Authority.make(authority.folder, replace=True)
    [sent] = certificates(cluster, ["mini"], said.append).values()
    assert renewed.has_issued(authority.folder / "mini.pem") and split_pem(sent) != split_pem(first["mini"])
    assert len(said) == 2


def test_a_launch_makes_an_expired_certificate_anew_where_the_authority_is(authority: Authority) -> None:
    cluster, said = ClusterConfig(tls=TlsConfig(keys=str(authority.folder))), list[str]()
    begins = datetime.now(UTC) - timedelta(days=2)
    path = authority.issue("mini", Role.WORKER, begins=begins, until=begins + timedelta(days=1))
    [sent] = certificates(cluster, ["mini"], said.append).values()
    assert KeyFile(authority.folder, "mini", Role.WORKER).read().certificate == split_pem(sent)[1]
    assert len(said) == 1 and re.search(
        rf"^made {path}, .* mini; the last one: {path}: the certificate expired", said[0]
    )
    path.chmod(0o644)
    certificates(cluster, ["mini"], said.append)
    assert len(said) == 2 and "others may read it" in said[1]


def test_a_launch_makes_a_certificate_that_expires_soon_anew_if_that_helps(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, said = ClusterConfig(tls=TlsConfig(keys=str(authority.folder))), list[str]()
    now, file = datetime.now(UTC), KeyFile(authority.folder, "mini", Role.WORKER)
    for days, num_made in ((31, 0), (29, 1)):  # doctor notes it from 30 days on
        authority.issue("mini", Role.WORKER, until=now + timedelta(days=days))
        certificates(cluster, ["mini"], said.append)
        assert len(said) == num_made
    assert "; the last one expires on 20" in said[0] and file.read().until > now + timedelta(days=364)
    monkeypatch.setattr("coordinator.deploy.authority.AUTHORITY_VALID", timedelta(days=9))
    Authority.make(authority.folder, replace=True)
    first = certificates(cluster, ["mini"], said.append)
    assert certificates(cluster, ["mini"], said.append) == first and len(said) == 2


def test_a_launch_leaves_files_alone_that_are_of_the_coordinators_authority_and_not_of_the_one_there(
    authority: Authority,
) -> None:
    """Keys were made twice, and the files of the first authority copied beside the key of the second."""
    first = Authority.make(authority.folder.with_name("first"))
    for name, role in (("coordinator", Role.COORDINATOR), ("mini", Role.WORKER)):
        first.issue(name, role).rename(authority.folder / f"{name}.pem")
    cluster, said = ClusterConfig(tls=TlsConfig(keys=str(authority.folder))), list[str]()
    sent = (authority.folder / "mini.pem").read_bytes()
    assert certificates(cluster, ["mini"], said.append) == {"mini": sent} and not said
    with pytest.raises(
        ConfigError, match=r"^air\.pem is missing in .*, whose authority did not issue coordinator\.pem"
    ):
        certificates(cluster, ["mini", "air"], said.append)


def test_another_authority_is_advised_only_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"authority\.key cannot be read: No such file .*; brigade keys init makes one"
    ):
        Authority.open(tmp_path)
    (tmp_path / AUTHORITY_FILE).mkdir()  # as unreadable as one of another user, for root as well
    with pytest.raises(ConfigError, match=r"authority\.key cannot be read: Is a directory$"):
        Authority.open(tmp_path)


def test_keys_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    with pytest.raises(ConfigError, match=r"expected .*keys to be a folder for keys, found a file"):
        Authority.make(tmp_path / "keys")


def test_a_name_that_a_certificate_cannot_carry_is_refused(authority: Authority) -> None:
    for name in ("10.0.0.1", "-x", "a..b", "7", "x.", "", "../mini", "a b", "*.local"):
        with pytest.raises(ConfigError, match="expected a name like that of a host"):
            authority.issue(name, Role.WORKER)


def test_a_renewal_changes_neither_role_nor_case_unnoticed(authority: Authority) -> None:
    path = authority.issue("studio", Role.COORDINATOR)
    before = path.read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"brigade:coordinator, not brigade:worker: renew it with --coordinator",
    ):
        authority.issue("studio", Role.WORKER)
    with pytest.raises(ConfigError, match=r"studio\.pem belongs to 'studio', and certificates ignore .* of 'STUDIO'"):
        authority.issue("STUDIO", Role.COORDINATOR)
    assert path.read_bytes() == before
    assert authority.issue("studio", Role.COORDINATOR).read_bytes() != before
    long = f"{'Long.' * 20}name"
    assert authority.issue(long, Role.WORKER) == authority.issue(long, Role.WORKER)
