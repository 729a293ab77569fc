import gzip
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.api.app import OPERATIONS, make_app
from coordinator.api.server import Server
from coordinator.engine.inputs import InputProcessor
from tests.unit.api.fakes import app, ask, served
from worker.errors import InputError

POSTED = [each.path for each in OPERATIONS if each.method == "POST"]
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {}, 415, "unsupported_media_type"),
        (gzip.compress(b"{}", mtime=0), JSON | {"Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
        (b"[]", JSON | {"Content-Encoding": "Identity"}, 400, "invalid_json"),
        (b"{" + b" " * 1000 + b"}", JSON, 413, "request_too_large"),
        (b"{}", JSON | {"Content-Length": "9" * 5000}, 413, "request_too_large"),
        (b"", JSON, 400, "invalid_json"),
        (b"\xff\xfe\x00", JSON, 400, "invalid_json"),
        (b'{"a": NaN}', JSON, 400, "invalid_json"),
        (b"[" * 999, JSON, 400, "invalid_json"),
        (b'{"a":' * 180 + b"1" + b"}" * 80, JSON, 400, "invalid_json"),
        (b'{"a":' + b"[" * 90 + b"]" * 90 + b"}", JSON, 400, "invalid_value"),
        (b'{"a": "\\ud800"}', JSON, 400, "invalid_value"),
        (b'{"a": {"\\udfff": 1}}', JSON, 400, "invalid_value"),
        (b'{"a": 1e999}', JSON, 400, "invalid_value"),
        (b'{"a": ' + b"9" * 300 + b"}", JSON, 400, "invalid_value"),
    ],
)
def test_odd_bodies_are_refused(content: bytes, headers: dict[str, str], status: int, code: str) -> None:
    server = app()
    for path in POSTED:
        found = ask(server, "POST", path, content=content, headers=headers)
        error = found.json()["error"]
        assert found.status_code == status, path
        if path.startswith("/v1/messages"):
            assert error.keys() == {"type", "message"}
            assert error["type"] == ("request_too_large" if status == 413 else "invalid_request_error")
        else:
            assert error["code"] == code, path
            assert error["param"] == ("a" if code == "invalid_value" else None), path  # not a field that is missing
        assert found.headers["x-should-retry"] == "false", path


def test_a_right_request_is_told_that_no_model_will_be_loaded() -> None:
    body, stopped = {"messages": [{"role": "user", "content": "hi"}]}, served()
    stopped.stop()
    found = ask(make_app(stopped), "POST", "/v1/chat/completions", json=body)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "draining")
    assert found.headers["retry-after"] == "5"
    assert ask(app(), "POST", "/v1/completions", json={"prompt": "a", "model": "gpt"}).status_code == 404
    wrong = ask(app(), "GET", "/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"


class Words(InputProcessor):
    """A tokenizer that says `a` for each token."""

    def __init__(self) -> None:
        self.spec = cast(Any, SimpleNamespace(context=8, vocab_size=100))

    async def text_of(self, tokens: Any) -> str:
        return "a" * len(tokens)

    async def prompt_ids(self, prompt: Any, *, most: int | None = None, special: bool = True) -> tuple[int, ...]:
        return (0,) * len(prompt)


class Refusing(Words):
    """A chat template that takes no conversation."""

    async def prompt_ids(self, prompt: Any, *, most: int | None = None, special: bool = True) -> tuple[int, ...]:
        raise InputError("prompt", "the chat template refuses this conversation")


def test_a_conversation_that_cannot_be_tokenized_is_refused_by_its_own_field() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    refused = ask(make_app(Server(Refusing(), ("talker",))), "POST", "/tokenize", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_more_tokens_than_anybody_has_a_use_for_are_refused() -> None:
    counting = make_app(Server(Words(), ("talker",)))
    for path, field, more in (("/detokenize", "tokens", [1] * 32769), ("/tokenize", "prompt", "a" * 32769)):
        assert ask(counting, "POST", path, json={field: more[:-1]}).status_code == 200
        refused = ask(counting, "POST", path, json={field: more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, field)
