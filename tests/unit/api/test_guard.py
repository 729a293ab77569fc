import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.api import auth
from coordinator.api.auth import Key, find_key, first_key, is_readable_by_others, load_keys
from tests.unit.api.fakes import app, ask
from worker.errors import InputError

PAGE = "https://page.example"


@pytest.fixture
def keys(tmp_path: Path) -> Sequence[Key]:
    path = tmp_path / "keys"
    path.write_text("# comment\n\nalice  key-of-alice\nkey-without-name\n")
    return load_keys(path)


def test_keys_have_names_and_fit_as_a_whole(keys: Sequence[Key]) -> None:
    found = [find_key(keys, given) for given in ("key-of-alice", "key-without-name", "key-of-alic", "")]
    assert [key and key.holder for key in found] == ["alice", "key 4", None, None]
    assert "key-of-alice" not in repr(keys)


def test_a_file_without_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pipe = tmp_path / "keys", tmp_path / "pipe"
    repeated = ("a 12345678\na 87654321\n", "a 12345678\nb 12345678\n", "BRIGADE_API_KEY 12345678\n")
    for text in ("", "# only\n", "short\n", "a b c\n", "bob kéy-of-bob\n", *repeated):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="api_key_file"):
            load_keys(path)
    os.mkfifo(pipe)
    for other in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match=r"expected a file|cannot be read"):
            load_keys(other)
    path.write_text("12345678\n")
    assert find_key(load_keys(path), "12345678")
    monkeypatch.setattr(auth, "MAX_FILE_BYTES", 8)
    with pytest.raises(InputError, match="at most 8 bytes"):
        load_keys(path)


def test_keys_of_other_servers_may_be_shorter_and_files_that_others_can_read_are_known(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# theirs\n\nme EMPTY\nanother\n")
    assert first_key(path) == "EMPTY"
    for mode, is_readable in ((0o600, False), (0o640, True), (0o604, True)):
        path.chmod(mode)
        assert is_readable_by_others(path) is is_readable


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/live", {}, 200),
        ("/health", {}, 503),
        ("/health?deep=1", {}, 401),
        ("/v1/models/gpt", {}, 401),
        ("/openapi.json", {}, 401),
        ("/nothing", {}, 401),
        ("/v1/models/gpt", {"Authorization": "Bearer key-of-alice"}, 404),
        ("/v1/models/gpt", {"Authorization": "bearer  key-of-alice "}, 404),
        ("/v1/models/gpt", {"x-api-key": "key-without-name"}, 404),
        ("/v1/models/gpt", {"Authorization": "Basic key-of-alice"}, 401),
        ("/v1/models/gpt", {"Authorization": "Bearer wrong-key"}, 401),
        ("/v1/models/gpt", {"Authorization": "Bearer none", "x-api-key": "key-of-alice"}, 404),
        ("/v1/models/gpt", {"Authorization": "Bearer key-of-alice", "x-api-key": "other"}, 404),
        ("/v1/models/gpt", {"Authorization": "Bearer none", "x-api-key": "other"}, 401),
        ("/v1/models/gpt", {"Authorization": "Bearer \xff\xfe"}, 401),
    ],
)
def test_without_a_key_only_the_state_is_told(
    keys: Sequence[Key], path: str, headers: dict[str, str], status: int
) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    found = ask(app(keys=keys), "GET", path, headers=encoded)
    assert found.status_code == status
    if status == 401:
        assert found.headers["www-authenticate"] == "Bearer"
        assert found.json()["error"]["code"] == "invalid_api_key" and "key-" not in found.text


def test_a_page_that_rebinds_its_name_gets_nothing() -> None:
    served = app(hosts=("localhost", "::1"))
    for host in ("localhost", "LOCALHOST:9338", "localhost.", "localhost.:9338", "[::1]:9338"):
        assert ask(served, "GET", "/live", headers={"Host": host}).status_code == 200
    for host in ("localhost.evil.example", "localhost..", "evil.example:9338", ""):
        refused = ask(served, "GET", "/live", headers={"Host": host})
        assert refused.status_code == 403 and "--allowed-host" in refused.json()["error"]["message"]


def test_an_answer_has_a_request_id_the_clients_own_if_it_is_one() -> None:
    for own, is_kept in (("abc-1", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("", False)):
        found = ask(app(), "GET", "/live", headers={"X-Request-Id": own}).headers["x-request-id"]
        assert (found == own) is is_kept and (is_kept or found.startswith("req_"))


def test_pages_of_other_origins_may_not_read_unless_they_are_named(keys: Sequence[Key]) -> None:
    headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key"}
    assert "access-control-allow-origin" not in ask(app(), "GET", "/live", headers={"Origin": PAGE}).headers
    assert ask(app(), "OPTIONS", "/v1/chat/completions", headers=headers).status_code == 405
    named = app(keys=keys, origins=(PAGE,))
    preflight = ask(named, "OPTIONS", "/v1/chat/completions", headers=headers)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == PAGE
    refused = ask(named, "GET", "/v1/models", headers={"Origin": PAGE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
    other = ask(named, "GET", "/live", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
