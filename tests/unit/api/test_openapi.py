import json
import re

import pytest

from coordinator.api.app import OPERATIONS
from coordinator.api.openapi import describe, schemas
from tests.schemas import breaches
from tests.unit.api.fakes import app, ask

DOCUMENT = describe(OPERATIONS, has_keys=False)


def test_every_route_is_in_the_document_with_its_methods_and_body() -> None:
    paths = ask(app(), "GET", "/openapi.json").json()["paths"]
    told = {(path, method) for path, methods in paths.items() for method in methods}
    assert told == {(each.path, each.method.lower()) for each in OPERATIONS}
    posted = {path: methods["post"] for path, methods in DOCUMENT["paths"].items() if "post" in methods}
    bodies = {path: body["requestBody"]["content"] for path, body in posted.items()}
    assert bodies.keys() >= {"/v1/messages", "/v1/messages/count_tokens", "/v1/responses"}
    for body in bodies.values():
        name = body["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert DOCUMENT["components"]["schemas"][name]["properties"]


def test_no_name_means_different_things_in_a_body_and_an_answer() -> None:
    bodies = schemas({each.body for each in OPERATIONS if each.body})
    answers = schemas({kind for each in OPERATIONS for kind in (each.answer, *each.events, *each.error_types) if kind})
    assert all(bodies[name] == answers[name] for name in bodies.keys() & answers.keys())


def test_every_reference_leads_to_a_schema() -> None:
    document = describe(OPERATIONS, has_keys=True)
    references = re.findall(r'"\$ref": ".*?/(\w+)"', json.dumps(document))
    assert references and set(references) <= document["components"]["schemas"].keys()
    assert document["openapi"] == "3.1.0" and document["security"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_streams_events_are_described(path: str) -> None:
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    said = data if path == "/v1/messages" else data["anyOf"][1]
    assert (said is data) or data["anyOf"][0] == {"const": "[DONE]"}
    error = {"error": {"message": "why", "type": "server_error", "param": None, "code": "internal_error"}}
    if path.endswith("completions"):
        assert not breaches(error, said["contentSchema"], DOCUMENT)
    assert breaches({"type": "nonsense"}, said["contentSchema"], DOCUMENT)


def test_refusals_are_described_by_their_status() -> None:
    for has_keys in (False, True):
        for methods in describe(OPERATIONS, has_keys=has_keys)["paths"].values():
            for each in methods.values():
                assert ("401" in each["responses"]) == has_keys and "403" in each["responses"]
    told = DOCUMENT["paths"]["/v1/messages"]["post"]["responses"]
    assert {"400", "404", "408", "413", "415", "429", "500", "503"} < told.keys()
    assert "Retry-After" in told["429"]["headers"] and "headers" not in told["400"]
    assert told["413"]["content"]["application/json"]["schema"]["$ref"].endswith("/AnthropicError")
