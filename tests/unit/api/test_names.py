from typing import Any, cast

import pytest

from coordinator.api.app import make_app
from coordinator.engine import grammars
from coordinator.engine.engine import Engine, ServerState, ServerStatus
from coordinator.sessions.request import RequestSpec
from tests.unit.api.servers import ask, served
from worker.errors import InputError


class Refusing:
    """A model that no request suits, for this field."""

    status = ServerStatus(ServerState.READY)

    def __init__(self, field: str) -> None:
        self.field = field

    async def prepare(self, ask: RequestSpec) -> Any:
        raise InputError(self.field, "wrong")


def refused(field: str, body: dict[str, Any]) -> str:
    app = make_app(served(model=cast(Engine, Refusing(field))))
    found = ask(app, "POST", "/v1/responses", json={"input": "hi"} | body)
    assert found.status_code == 400
    return str(found.json()["error"]["param"])


@pytest.mark.parametrize(
    ("field", "told"),
    [("prompt", "input"), ("max_tokens", "max_output_tokens"), ("response_format", "text.format")],
)
def test_a_response_that_is_refused_is_told_by_its_own_fields(field: str, told: str) -> None:
    assert refused(field, {}) == told


def test_a_prompt_of_open_responses_is_no_input() -> None:
    assert refused("", {"prompt": {"id": "pmpt_1"}}) == "prompt"


def test_a_schema_that_cannot_be_enforced_is_told_by_its_own_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_BYTES", 10)
    format = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    assert refused("", {"text": {"format": format}}) == "text.format"
