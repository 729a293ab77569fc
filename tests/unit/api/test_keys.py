"""API keys from a file and the environment: their names, and how many requests each may have at once."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from coordinator.api.app import make_app
from coordinator.api.auth import KEY_VARIABLE, Key, find_key, first_key, load_keys
from coordinator.cluster.log import log_as_json
from coordinator.engine.stats import KEY_HOLDER, Stats
from coordinator.engine.status import log_request
from coordinator.sessions.request import Request
from tests.unit.api.fakes import ScriptedModel, app, ask, delta, last, served
from tests.unit.api.test_agent_requests import Listening
from worker.errors import InputError

SECRET = "key-of-alice"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def keys_of(tmp_path: Path, text: str) -> Sequence[Key]:
    (tmp_path / "keys").write_text(text)
    found = load_keys(tmp_path / "keys")
    assert found is not None
    return found


def holder(keys: Sequence[Key], given: str) -> str | None:
    found = find_key(keys, given)
    return found and found.holder


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


@pytest.mark.parametrize(
    "line",
    [
        *("a 12345678 at_once=0", "a 12345678 at_once=x", "a 12345678 priority", "a 12345678 priority=-", "a b c d"),
        *("12345678 at_once=x", "12345678 priority", "12345678 #comments", "12345678 at_once=2 priority=x"),
    ],
)
def test_a_wrong_line_is_refused_without_its_key(tmp_path: Path, line: str) -> None:
    with pytest.raises(InputError, match="line 1") as refused:
        keys_of(tmp_path, line)
    assert "12345678" not in str(refused.value)


def test_a_key_without_a_name_has_its_limits(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, f"{SECRET} at_once=2\nkey-of-batch priority=5 at_once=3\nkey-of-all\n")
    found = [find_key(keys, key) for key in (SECRET, "key-of-batch", "key-of-all")]
    assert found == list(keys) and holder(keys, "at_once=2") is holder(keys, "priority=5") is None
    limits = [(each.holder, each.most_at_once, each.best_priority) for each in keys]
    assert limits == [("key 1", 2, 0), ("key 2", 3, 5), ("key 3", None, 0)]


class Held(ScriptedModel):
    """Answers once it may."""

    def __init__(self) -> None:
        super().__init__([delta("x"), last()])
        self.may_end = asyncio.Event()
        self.holders: list[str] = []

    async def make_request(self, ask: Any) -> Any:
        self.holders.append(KEY_HOLDER.get())
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
    keys = keys_of(tmp_path, f"alice {SECRET} at_once=2\nbob key-of-bob\n")
    body = {"input": "hi", "stream": streamed}
    model = Held()
    transport = httpx2.ASGITransport(make_app(served(model=model), keys=keys), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def post(key: str) -> httpx2.Response:
            return await client.post("/v1/responses", json=body, headers={"x-api-key": key})

        running = [asyncio.create_task(post(key)) for key in (SECRET, SECRET, "key-of-bob", "key-of-bob")]
        while len(model.holders) < 4:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        refused = await post(SECRET)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] and SECRET not in refused.text
        status = await client.get("/v1/models", headers={"x-api-key": SECRET})
        assert status.status_code != 429
        model.may_end.set()
        assert [(await each).status_code for each in running] == [200] * 4
        assert (await post(SECRET)).status_code == 200
        assert sorted(model.holders[:4]) == ["alice", "alice", "bob", "bob"]


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
