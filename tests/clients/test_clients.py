"""What clients send, replayed against a server: each file of this folder has a client's bodies, and their source.

Limits are cut to few tokens: the model has random weights and never ends an answer by itself.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cluster.callers import make_caller
from tests.cluster.processes import starting
from tests.cluster.servers import Server
from tests.tiny import change_json

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system message comes first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for name, value in call.function.arguments|items %} {{ name }}={{ value }}{% endfor %}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("*.json"))}
EACH = pytest.mark.parametrize("client", RECORDED)
WHOLE = {"cline": "tool_calls", "codex": "tool_calls", "claude_code": "tool_use"}  # a client of each API: 0.2 to 1 s
CALLING = pytest.mark.parametrize("client", [name for name, found in RECORDED.items() if found["first"].get("tools")])
LIMITS = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
MANY = {"/v1/chat/completions": "required", "/v1/responses": "required", "/v1/messages": {"type": "any"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_caller(tmp_path_factory.mktemp("clients") / "model", thinks=False)
    change_json(folder / "tokenizer_config.json", chat_template=TEMPLATE, tool_parser_type="json_tools")
    with starting() as start:
        running = start.brigade("serve", "--model", folder, "--port", "0", "--local", "0", "--context", "16000")
        found = running.err.wait_match(r"serving .* at (\S+), up to \d+ tokens", 120)
        yield Server(running, found[1])


@dataclass
class Told:
    """What a stream said."""

    text: str = ""
    names: dict[Any, str] | None = None
    arguments: dict[Any, str] | None = None
    reason: str | None = None
    model: str = ""
    left_out: str = ""


def path_of(client: str) -> str:
    return str(RECORDED[client]["path"]).partition("?")[0]


def turn(client: str, name: str, *, limit: int = 8, **more: Any) -> dict[str, Any]:
    """A recorded body."""
    found = RECORDED[client]
    body: dict[str, Any] = found["first"] | (found["result"] if name == "result" else {})
    limits = {key: limit for key in ("max_tokens", "max_output_tokens", "max_completion_tokens") if key in body}
    return body | (limits or {LIMITS[path_of(client)]: limit}) | more


def followed(client: str, body: dict[str, Any], *messages: dict[str, Any]) -> dict[str, Any]:
    key = "input" if path_of(client) == "/v1/responses" else "messages"
    return body | {key: [*body[key], *messages]}


def asked(server: Server, client: str, body: dict[str, Any]) -> Told:
    """Return what the answer's stream says; fails for any other status."""
    with httpx2.stream("POST", f"{server.url}{RECORDED[client]['path']}", json=body, timeout=100) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    told = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}[path_of(client)](events)
    told.left_out = response.headers.get("brigade-left-out", "")
    return told


def chat(events: list[dict[str, Any]]) -> Told:
    told = Told(names={}, arguments={}, model=events[0]["model"])
    for choice in (choice for event in events for choice in event["choices"]):
        told.text += choice["delta"].get("content", "")
        told.reason = choice["finish_reason"] or told.reason
        for call in choice["delta"].get("tool_calls", ()):
            index, function = call["index"], call["function"]
            assert ("id" in call) == ("name" in function) == (index not in told.names), "named once, first"
            told.names.setdefault(index, function.get("name", ""))
            told.arguments[index] = told.arguments.get(index, "") + function["arguments"]
    return told


def responses(events: list[dict[str, Any]]) -> Told:
    told = Told(names={}, arguments={}, model=events[0]["response"]["model"])
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                told.text += event["delta"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                told.names[event["item"]["id"]], told.arguments[event["item"]["id"]] = event["item"]["name"], ""
            case "response.function_call_arguments.delta":
                told.arguments[event["item_id"]] += event["delta"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    end = events[-1]["response"]
    calls = [item for item in end["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == list(told.arguments.values())
    told.reason = "tool_calls" if calls and end["status"] == "completed" else end["status"]
    return told


def messages(events: list[dict[str, Any]]) -> Told:
    told = Told(names={}, arguments={}, model=events[0]["message"]["model"])
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                told.names[event["index"]], told.arguments[event["index"]] = event["content_block"]["name"], ""
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                told.arguments[event["index"]] += event["delta"]["partial_json"]
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                told.text += event["delta"]["text"]
            case "message_delta":
                told.reason = event["delta"]["stop_reason"]
    return told


def names_in(body: dict[str, Any]) -> set[str]:
    return {tool.get("function", tool).get("name") for tool in body["tools"]}


@EACH
def test_every_turn_of_a_client_is_answered_in_the_name_that_it_asked_for(server: Server, client: str) -> None:
    for name in ("first", "result"):
        told = asked(server, client, turn(client, name))
        assert told.model == "brigade"
        assert told.reason in ("length", "incomplete", "max_tokens", "stop", "completed", "end_turn")
    again = followed(client, turn(client, "result"), {"role": "assistant", "content": "It says hello."})
    assert asked(server, client, followed(client, again, {"role": "user", "content": "And b.txt?"})).reason
    assert asked(server, client, again).reason, "an answer that was begun is continued"


@CALLING
def test_a_call_streams_with_its_name_and_its_arguments_or_as_far_as_it_went(server: Server, client: str) -> None:
    """Forced, since the model has random weights: hundreds of tokens until a call ends."""
    choice = {"tool_choice": MANY[path_of(client)], "temperature": 1.0, "parallel_tool_calls": False}
    for limit in (600, 40) if client in WHOLE else (40,):
        told = asked(server, client, turn(client, "first", limit=limit, **choice, seed=3))
        [name], [arguments] = told.names.values(), told.arguments.values()
        assert name in names_in(turn(client, "first")) and "tool_call>" not in told.text
        if limit == 600:
            assert told.reason == WHOLE[client] and isinstance(json.loads(arguments), dict)
        else:
            assert told.reason in ("length", "incomplete", "max_tokens") and arguments.startswith("{")


def test_what_codex_offers_and_no_model_can_call_is_named(server: Server) -> None:
    told = asked(server, "codex", turn("codex", "first"))
    assert set(told.left_out.split(", ")) == {"tools.namespace", "tools.web_search", "schema"}
