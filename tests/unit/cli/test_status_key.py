from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import status
from tests.unit.cli.conftest import Command
from worker.errors import InputError


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys that a server is asked with."""
    keys: list[Any] = []
    monkeypatch.setattr(status, "ask_server", lambda server, key: keys.append(key) or {})
    return keys


def test_the_first_key_of_a_servers_file_is_brought(tmp_path: Path, brought: list[Any], brigade: Command) -> None:
    path = tmp_path / "keys"
    path.write_text("# comment\n\nalice  key-of-alice\nkey-without-name\n")
    brigade("status", "--api-key-file", str(path), "--json")
    assert brought == ["key-of-alice"]


def test_keys_come_from_nowhere_else(monkeypatch: pytest.MonkeyPatch, brought: list[Any], brigade: Command) -> None:
    monkeypatch.setenv("BRIGADE_API_KEY", "key-of-alice")
    brigade("status", "--json")
    assert brought == [None]


def test_a_file_without_a_key_is_not_taken_for_none(tmp_path: Path, brought: list[Any], brigade: Command) -> None:
    (tmp_path / "keys").touch()
    with pytest.raises(InputError, match=r"^api_key_file: .* expected a key per line, found none"):
        brigade("status", "--api-key-file", str(tmp_path / "keys"), "--json")
    assert not brought
