"""API keys and hosts: which requests are let in, the names and limits of keys, and the files that they come from."""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coordinator.api import auth
from coordinator.api.app import make_app
from coordinator.api.auth import KEY_VARIABLE, Key, find_key, first_key, is_readable_by_others, load_keys
from coordinator.cluster.log import log_as_json
from coordinator.engine.caller import ARRIVED, KEY_HOLDER
from coordinator.engine.stats import Stats
from coordinator.engine.status import log_request
from coordinator.sessions.request import Request
from tests.unit.api.fakes import ScriptedModel, app, ask, delta, last, served
from tests.unit.api.test_agent_requests import Listening
from worker.errors import InputError

SECRET = "key-of-alice"
PAGE = "https://page.example"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def keys_of(tmp_path: Path, text: str) -> Sequence[Key]:
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    found = load_keys(tmp_path / "keys")
    assert found is not None
    return found


@pytest.fixture
def keys(tmp_path: Path) -> Sequence[Key]:
    return keys_of(
        tmp_path, f"# comment\n\nalice  {SECRET}\nkey-without-name at_once=2\nkey-of-batch priority=5 at_once=3\n"
    )


def holder(keys: Sequence[Key], given: str) -> str | None:
    found = find_key(keys, given)
    return found and found.holder


def test_keys_have_names_and_limits_and_fit_as_a_whole(keys: Sequence[Key]) -> None:
    found = [(key.holder, key.most_at_once, key.best_priority) for key in keys]
    assert found == [("alice", None, 0), ("key 4", 2, 0), ("key 5", 3, 5)]
    given = (SECRET, "key-without-name", SECRET[:-1], "", "at_once=2", "priority=5")
    assert [holder(keys, each) for each in given] == ["alice", "key 4", None, None, None, None]
    assert SECRET not in repr(keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "expected a key per line, found none") for text in ("", "# only\n")),
        *((text, "line 1: ") for text in ("short", "a b c", "bob kéy-of-bob", "a 12345678 at_once=0", "a b c d")),
        *((f"a 12345678 {limit}", "line 1: ") for limit in ("at_once=x", "priority", "priority=-")),
        *((f"12345678 {limit}", "line 1: ") for limit in ("at_once=x", "priority", "#note", "at_once=2 priority=x")),
        *((f"a 12345678\n{text}", "line 2: ") for text in ("a 87654321", "b 12345678")),
        ("BRIGADE_API_KEY 12345678", "line 1: "),
    ],
)
def test_a_file_that_is_none_of_keys_is_refused_without_them(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        keys_of(tmp_path, text)
    assert refused.value.field == "api_key_file" and "12345678" not in refused.value.message


def test_only_a_regular_file_is_read_and_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pipe = tmp_path / "keys", tmp_path / "pipe"
    os.mkfifo(pipe)
    for other in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match=r"expected a file|cannot be read"):
            load_keys(other)
    path.write_text("12345678\n")
    assert load_keys(path)
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


def test_a_key_of_the_environment_counts_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_keys(None) is None and first_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "key-of-the-environment")
    alone = load_keys(None)
    assert alone and holder(alone, "key-of-the-environment") == KEY_VARIABLE
    both = keys_of(tmp_path, f"alice {SECRET}\n")
    assert holder(both, SECRET) == "alice" and holder(both, "key-of-the-environment") == KEY_VARIABLE
    assert first_key(None) == "key-of-the-environment" and first_key(tmp_path / "keys") == SECRET
    assert ask(app(keys=alone), "GET", "/v1/models/gpt").status_code == 401
    for unsendable in ("schlüssel-der-umgebung", "key-of-a-file\r"):
        monkeypatch.setenv(KEY_VARIABLE, unsendable)
        with pytest.raises(InputError, match=f"^api_key_file: {KEY_VARIABLE}: expected 1 to "):
            first_key(None)
    for short in ("short", "with a blank"):
        monkeypatch.setenv(KEY_VARIABLE, short)
        with pytest.raises(InputError, match=KEY_VARIABLE) as refused:
            load_keys(None)
        assert short not in str(refused.value)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    for text in (f"alice {SECRET}\n", f"# keys\nalice {SECRET}\n"):
        assert holder(keys_of(tmp_path, "\ufeff" + text), SECRET) == "alice"
    assert holder(keys_of(tmp_path, f"\ufeff{SECRET}\n"), SECRET) == "key 1"


class Held(ScriptedModel):
    """Answers once it may."""

    def __init__(self) -> None:
        super().__init__([delta("x"), last()])
        self.may_end = asyncio.Event()
        self.holders: list[str] = []
        self.arrived: list[int] = []

    async def make_request(self, ask: Any) -> Any:
        self.holders.append(KEY_HOLDER.get())
        self.arrived.append(ARRIVED.get())
        await self.may_end.wait()
        return await super().make_request(ask)


def test_a_request_goes_before_others_only_as_far_as_its_key_may(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, f"alice {SECRET} priority=-3 at_once=2\nbatch key-of-batch priority=5\nbob key-of-bob\n")
    assert [each.most_at_once for each in keys] == [2, None, None]
    for key, priority, found in (
        (SECRET, None, 0), (SECRET, -3, -3), (SECRET, -4, None), (SECRET, 9, 9),
        ("key-of-batch", None, 5), ("key-of-batch", 4, None), ("key-of-bob", None, 0), ("key-of-bob", -1, None),
    ):  # fmt: skip
        model = Listening()
        body = {"input": "hi", "priority": priority}
        told = ask(
            make_app(served(model=model), keys=keys), "POST", "/v1/responses", json=body, headers={"x-api-key": key}
        )
        assert [spec.priority for spec in model.asked] == ([] if found is None else [found])
        if found is None:
            assert (told.status_code, told.json()["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_key_has_only_so_many_requests_at_once(tmp_path: Path, *, streamed: bool) -> None:
    keys, began = keys_of(tmp_path, f"alice {SECRET} at_once=2\nbob key-of-bob\n"), time.monotonic_ns()
    body = {"input": "hi", "stream": streamed}
    model = Held()
    server = served(model=model)
    transport = httpx2.ASGITransport(make_app(server, keys=keys), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def post(key: str) -> httpx2.Response:
            return await client.post("/v1/responses", json=body, headers={"x-api-key": key})

        running = [asyncio.create_task(post(key)) for key in (SECRET, SECRET, "key-of-bob", "key-of-bob")]
        while len(model.holders) < 4:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        refused = await post(SECRET)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] and SECRET not in refused.text
        assert server.stats.counts("requests_rejected") == {"QueueFull": 1}
        status = await client.get("/v1/models", headers={"x-api-key": SECRET})
        assert status.status_code != 429
        model.may_end.set()
        assert [(await each).status_code for each in running] == [200] * 4
        assert (await post(SECRET)).status_code == 200
        assert sorted(model.holders[:4]) == ["alice", "alice", "bob", "bob"]
        assert all(began <= at <= time.monotonic_ns() for at in model.arrived)


def test_requests_and_tokens_are_counted_and_logged_by_the_name_of_their_key(capfd: pytest.CaptureFixture[str]) -> None:
    stats = Stats(log_request)
    with log_as_json(True):
        for name in ("alice", ""):
            token = KEY_HOLDER.set(name)
            request = stats.begin(Request((1,), 1))
            KEY_HOLDER.reset(token)
            request.take(delta("x"))
            request.take(last())
            request.end()
    assert stats.counts("key_requests") == {"alice": 1} and stats.counts("key_tokens") == {"alice": 2}
    assert [json.loads(line).get("key") for line in capfd.readouterr().err.splitlines()] == ["alice", None]


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
