"""What agents send to the three conversation APIs is read alike: see docs/http.md."""

import asyncio
import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.api.anthropic import MessagesBody
from coordinator.api.app import make_app
from coordinator.api.auth import load_keys
from coordinator.api.body import read
from coordinator.api.openai import ChatBody
from coordinator.api.responses import ResponsesBody
from coordinator.api.serve import ServeOptions
from coordinator.api.server import Server
from coordinator.engine.engine import ServerState
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Output
from coordinator.sessions.request import Conversation, Request, RequestSpec
from protos.brigade_pb2 import Sampling
from tests.unit.api.fakes import ScriptedModel, app, ask, delta, last, served
from worker.errors import ContextExceeded, InputError

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
KINDS: dict[str, Any] = {"chat": ChatBody, "responses": ResponsesBody, "messages": MessagesBody}
EVERY = pytest.mark.parametrize("api", list(PATHS))


class Listening(ScriptedModel):
    """Keeps the requests that it prepares."""

    def __init__(self, script: Sequence[Output | Exception] = (delta("x"), last())) -> None:
        super().__init__(script)
        self.asked: list[RequestSpec] = []

    async def make_request(self, ask: RequestSpec) -> Any:
        self.asked.append(ask)
        return await super().make_request(ask)


def conversation(api: str, **fields: Any) -> Conversation:
    prompt = spec(api, **fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def spec(api: str, **fields: Any) -> RequestSpec:
    found: RequestSpec = read(KINDS[api], BODIES[api] | fields).to_spec()
    return found


def turns(api: str, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"input" if api == "responses" else "messages": list(messages)}


def posted(api: str, fields: dict[str, Any], model: Any = None) -> Any:
    """The answer of a server with a model that says `x`."""
    server = served(model=model or Listening())
    return ask(make_app(server), "POST", PATHS[api], json=BODIES[api] | fields)


# --- tools and parts that this server cannot take ---------------------------------------------------------------------

NAMED = {
    "chat": {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    "responses": {"type": "function", "name": "look", "parameters": {"type": "object"}},
    "messages": {"name": "look", "input_schema": {"type": "object"}},
}


@EVERY
def test_tools_that_the_server_cannot_offer_are_left_out_and_named(api: str) -> None:
    model = Listening()
    found = posted(api, {"tools": [{"type": "web_search", "name": "x"}, NAMED[api]]}, model)
    assert found.status_code == 200, found.text
    assert found.headers["brigade-left-out"] == "tools.web_search"
    assert [tool["function"]["name"] for tool in model.asked[0].tools] == ["look"]


def test_what_was_left_out_is_named_by_streams_too_and_no_name_breaks_a_header() -> None:
    tools = [{"type": "web_search"}, {"type": "é\r\nSet-Cookie: x" + "y" * 99}]
    found = posted("chat", {"tools": tools, "stream": True})
    first, second = found.headers["brigade-left-out"].split(", ")
    assert first == "tools.web_search" and len(second) < 80 and "set-cookie" not in found.headers
    assert "brigade-left-out" not in posted("chat", {}).headers


class Unenforceable(ScriptedModel):
    """Cannot enforce the schema of the first tool that it is offered."""

    async def make_request(self, ask: RequestSpec) -> Any:
        raise InputError("tools.0.function.parameters", "expected a JSON schema")


@pytest.mark.parametrize(
    ("api", "field"),
    [
        ("chat", "tools.1.function.parameters"), ("responses", "tools.1.parameters"),
        ("messages", "tools.1.input_schema"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_enforced_is_named_by_its_place_in_the_body(api: str, field: str) -> None:
    found = posted(api, {"tools": [{"type": "web_search"}, NAMED[api]]}, Unenforceable([]))
    error = found.json()["error"]
    assert found.status_code == 400 and error.get("param", field) == field
    assert error["message"].startswith(f"{field}: ")


NOTE = "[image left out: this model reads text only]"
IMAGES = [
    ("chat", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}, "user"),
    ("chat", {"role": "tool", "tool_call_id": "t", "content": [{"type": "image_url", "image_url": {}}]}, "tool"),
    ("responses", {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}, "user"),
    ("responses", {"type": "function_call_output", "call_id": "t", "output": [{"type": "input_image"}]}, "tool"),
    ("messages", {"role": "user", "content": [{"type": "image", "source": {}}]}, "user"),
    (
        "messages",
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]},
        "tool",
    ),
]


@pytest.mark.parametrize(("api", "message", "role"), IMAGES)
def test_an_image_becomes_a_note_in_its_place(api: str, message: dict[str, Any], role: str) -> None:
    [found] = conversation(api, **turns(api, message)).messages
    assert (found["role"], found["content"]) == (role, NOTE)
    assert posted(api, turns(api, message)).headers["brigade-left-out"] == "image"


def test_documents_of_text_are_read_and_other_blocks_of_a_result_are_named() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a b"}}
    pdf = {"type": "document", "source": {"type": "base64", "data": "JVBE"}}
    reference = {"type": "tool_reference", "tool_name": "x"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [plain, pdf, reference]}
    [found] = conversation("messages", messages=[{"role": "user", "content": [result]}]).messages
    said = found["content"].splitlines()
    assert said[0] == "a b" and ["document" in said[1], "tool_reference" in said[2]] == [True, True]


def test_items_of_tools_that_another_server_ran_do_not_end_a_conversation() -> None:
    items = [
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        {"role": "user", "content": "go on"},
    ]
    call, result, user = conversation("responses", input=items).messages
    assert call["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert (result["role"], result["content"], user["content"]) == ("tool", "ok", "go on")


# --- earlier turns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("", {}), (" \n", {}), ('{"a": 1}', {"a": 1}), ("[1]", {"arguments": [1]}), ("nope", {"arguments": "nope"})],
)
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_arguments_of_a_past_call_are_an_object(api: str, arguments: str, expected: Any) -> None:
    if api == "chat":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    else:
        message = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    [found] = conversation(api, **turns(api, message)).messages
    assert found["tool_calls"][0]["function"]["arguments"] == expected


def test_a_past_call_without_arguments_has_none() -> None:
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": None}}
    [found] = conversation("chat", messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert found["tool_calls"][0]["function"]["arguments"] == {}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": None}
    [found] = conversation("messages", messages=[{"role": "assistant", "content": [use]}]).messages
    assert found["tool_calls"][0]["function"]["arguments"] == {}


@EVERY
def test_refusals_of_earlier_turns_are_text_and_thoughts_are_not(api: str) -> None:
    kind = "output_text" if api == "responses" else "text"
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": kind, "text": "I"}]
    if api != "messages":
        parts.append({"type": "refusal", "refusal": "cannot"})
    assistant, user = {"role": "assistant", "content": parts}, {"role": "user", "content": "why?"}
    found, _ = conversation(api, **turns(api, assistant, user)).messages
    assert found["content"] == ("I" if api == "messages" else "I\ncannot")
    assert found.get("reasoning_content") == "hm"


@EVERY
def test_a_trailing_answer_is_taken_as_one_to_continue(api: str) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [each["role"] for each in conversation(api, **turns(api, *said)).messages] == ["user", "assistant"]


# --- numbers and switches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-2, -1, 0, None])
def test_a_limit_that_is_none_counts_as_not_given(value: int | None) -> None:
    assert spec("chat", max_tokens=value).max_tokens is None
    assert spec("chat", max_tokens=value, max_completion_tokens=7).max_tokens == 7
    assert spec("responses", max_output_tokens=value).max_tokens is None
    assert spec("messages", max_tokens=value).max_tokens is None


@EVERY
def test_a_negative_seed_counts_as_not_given(api: str) -> None:
    assert "seed" not in spec(api, seed=-1).sampling
    assert spec(api, seed=0).sampling["seed"] == 0


@EVERY
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": 1}}, {"enable_thinking": 1}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": None}}, {}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
         {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)  # fmt: skip
def test_the_switches_of_reasoning_mean_the_same(api: str, fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert conversation(api, **fields).template_arguments == arguments


# --- errors, names and keys -------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("streamed", [True, False])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(api: str, streamed: bool) -> None:
    class Full(Listening):
        async def make_request(self, ask: RequestSpec) -> Any:
            raise ContextExceeded("prompt", "expected less", num_tokens=210, most=200, context=201)

    server = served(model=Full())
    found = ask(make_app(server), "POST", PATHS[api], json=BODIES[api] | {"stream": streamed})
    assert server.stats.counts("requests_rejected") == {"ContextExceeded": 1}
    [refused] = server.stats.recent
    assert (refused.finish_reason, refused.num_prompt) == ("refused", 210)
    error = found.json()["error"]
    assert found.status_code == 400
    if api == "messages":
        assert error["message"].startswith("prompt is too long: 210 tokens > 200 maximum")
    else:
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 201 tokens, of which a prompt may have 200:" in error["message"]
        assert error["param"] == ("messages" if api == "chat" else "input")


@EVERY
@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_names_the_model_that_was_asked_for(api: str, streamed: bool) -> None:
    model: Any = Listening()
    server = Server(model, ["one", "two"], answers_any_name=True)
    server.open(model)
    for asked, named in (("two", "two"), ("claude-haiku-4-5", "claude-haiku-4-5"), (None, "one")):
        body = BODIES[api] | {"model": asked, "stream": streamed}
        found = ask(make_app(server), "POST", PATHS[api], json=body)
        assert found.status_code == 200 and f'"model":"{named}"' in found.text
    found = ask(make_app(server), "POST", PATHS[api], json=BODIES[api] | {"model": "x" * 999})
    assert found.status_code == 400 and found.json()["error"]["message"].startswith("model")


def test_a_public_server_without_keys_knows_addresses_and_its_own_names(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("alice key-of-alice\n")
    keys, own = load_keys(tmp_path / "keys"), socket.gethostname()
    page, hosts = "rebound.example:9338", ["192.168.1.5:9338", "[fe80::1]:9338", "localhost", f"{own.upper()}:1"]
    for more, refused in (({"insecure": True}, [page]), ({"keys": keys}, []), ({"allowed_hosts": ["me."]}, [page])):
        server = app(hosts=ServeOptions("0.0.0.0", 0, **more).hosts)  # type: ignore[arg-type]
        for host in (*hosts, page, "me" if "allowed_hosts" in more else "localhost"):
            status = ask(server, "GET", "/live", headers={"Host": host}).status_code
            assert status == (403 if host in refused else 200), host


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("POST", "/messages", "/v1/messages"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
    ],
)
def test_a_wrong_base_url_is_answered_with_the_path_that_was_meant(method: str, path: str, meant: str) -> None:
    found = ask(app(), method, path, json={} if method == "POST" else None)
    assert found.status_code == 404 and f"{meant}" in found.json()["error"]["message"]
    assert "/v1" not in ask(app(), "GET", "/nothing").json()["error"]["message"]


async def test_a_request_waits_for_a_model_that_is_loaded_for_the_first_time() -> None:
    server, model = served(), Listening()
    waiting = asyncio.create_task(server.wake_engine())
    await asyncio.wait([waiting], timeout=0)
    assert not waiting.done() and server.state is ServerState.LOADING
    server.open(model)  # type: ignore[arg-type]
    assert await waiting is model


class Counting(InputProcessor):
    """A tokenizer that makes as many tokens as the first message says."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(context=8)  # type: ignore[assignment]

    async def prompt_ids(self, prompt: Any, *, most: int | None = None, special: bool = True) -> tuple[int, ...]:
        return (0,) * int(prompt.messages[0]["content"])


def test_counting_has_a_bound() -> None:
    server = make_app(Server(Counting(), ["talker"]))
    for length, status in ((30_000, 200), (40_000, 413)):
        body = {"messages": [{"role": "user", "content": str(length)}]}
        assert ask(server, "POST", "/v1/messages/count_tokens", json=body).status_code == status


# --- fields of others -------------------------------------------------------------------------------------------------


def test_unknown_fields_are_ignored_and_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    server = served(model=Listening())
    for _ in range(2):
        body = BODIES["chat"] | {"user": "x", "\x1b[2J" + "z" * 80: 1, "top_k": 3}
        assert ask(make_app(server), "POST", PATHS["chat"], json=body).status_code == 200
    told = capfd.readouterr().err
    assert told.count("user") == 1 and told.count("?2Jz") == 1 and "\x1b" not in told and "z" * 80 not in told
    assert "top_k" not in told and "messages" not in told


def test_a_client_cannot_fill_the_log_with_names(capfd: pytest.CaptureFixture[str]) -> None:
    server = served(model=Listening())
    for first in range(0, 300, 30):
        body = BODIES["chat"] | {f"x{number}": 1 for number in range(first, first + 30)}
        assert ask(make_app(server), "POST", PATHS["chat"], json=body).status_code == 200
    assert len([line for line in capfd.readouterr().err.splitlines() if "ignores" in line]) == 100


@EVERY
def test_keywords_of_a_schema_that_are_not_enforced_are_named(api: str) -> None:
    class Lenient(Listening):
        async def make_request(self, ask: RequestSpec) -> Any:
            return Request((1,) * 7, 5, Sampling(), not_enforced=("schema.uniqueItems",))

    assert posted(api, {}, Lenient()).headers["brigade-left-out"] == "schema.uniqueItems"
