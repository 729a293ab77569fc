from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import status
from worker.errors import InputError


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys that a server is asked with."""
    keys: list[Any] = []
    monkeypatch.setattr(status, "ask_server", lambda server, key: keys.append(key) or {})
    return keys


def test_the_first_key_of_a_servers_file_is_brought(tmp_path: Path, brought: list[Any]) -> None:
    path = tmp_path / "keys"
    path.write_text("# comment\n\nalice  key-of-alice\nkey-without-name\n")
    status.status(api_key_file=path, as_json=True)
    assert brought == ["key-of-alice"]


def test_keys_come_from_nowhere_else(monkeypatch: pytest.MonkeyPatch, brought: list[Any]) -> None:
    monkeypatch.setenv("BRIGADE_API_KEY", "key-of-alice")
    status.status(as_json=True)
    assert brought == [None]


def test_a_file_without_a_key_is_not_taken_for_none(tmp_path: Path, brought: list[Any]) -> None:
    (tmp_path / "keys").touch()
    with pytest.raises(InputError, match=r"^api_key_file: .* expected a key per line, found none"):
        status.status(api_key_file=tmp_path / "keys", as_json=True)
    assert not brought
