import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.api import body
from coordinator.api.app import make_app
from coordinator.api.server import RequestLimits, Server
from coordinator.engine.inputs import InputProcessor
from tests.unit.api.servers import ask


class Words(InputProcessor):
    """A tokenizer that says `a` for each token."""

    def __init__(self) -> None:
        self.spec = cast(Any, SimpleNamespace(context=8, vocab_size=100))

    async def text_of(self, tokens: Any) -> str:
        return "a" * len(tokens)

    async def prompt_ids(self, prompt: Any, *, most: int | None = None, special: bool = True) -> tuple[int, ...]:
        return (0,) * len(prompt)


def server(**limits: int) -> Any:
    return make_app(Server(Words(), ("talker",), RequestLimits(**limits)))


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [("/detokenize", "tokens", [1] * 32769), ("/tokenize", "prompt", "a" * 32769)],
)
def test_more_tokens_than_anybody_has_a_use_for_are_refused(path: str, field: str, more: Any) -> None:
    assert ask(server(), "POST", path, json={field: more[:-1]}).status_code == 200
    refused = ask(server(), "POST", path, json={field: more})
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, field)


def test_only_small_bodies_are_parsed_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, threads = json.loads, []

    def loads(*args: Any, **more: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*args, **more)

    monkeypatch.setattr(body, "json", SimpleNamespace(loads=loads))
    for size in (1, body.MAX_INLINE_BYTES):
        ask(server(), "POST", "/v1/completions", json={"prompt": "a" * size})
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
