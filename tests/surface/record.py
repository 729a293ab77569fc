"""Writes the surface of the product, a fact per line: `python tests/surface/record.py FOLDER SECTION...` of SECTIONS.

It asks whichever checkout Python finds (PYTHONPATH, a virtual environment) and relies on no module of the product but
the two that start a command, so that the same file reads a version before a change and one after it.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin

from tests.cluster.commands import run_here
from tests.cluster.models import make_talker
from tests.cluster.processes import starting

Json = dict[str, Any]
WAIT_S = 180.0  # for anything that a process has to do: this makes no claim about time
# objects whose keys are data
_NAMED = r"(versions|tokens_per_s_at|stage_ms|parts_ms|finished|refused|logprobs\.top_logprobs)$"


def shapes(found: Any, path: str = "") -> Iterator[str]:
    """Yield `path: type` of every value inside; all entries of a list have one path."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from shapes(value, f"{path}.{'*' if re.search(_NAMED, path.removesuffix('[]')) else key}")
    elif isinstance(found, list):
        if not found:  # whether there were drafts may depend on how fast the machine is
            yield f"{path}[]: {'number' if path.endswith('.drafts_held') else '-'}"
        for each in found:
            yield from shapes(each, f"{path}[]")
    else:
        kind = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}[type(found)]
        yield f"{path}: {kind}"


def united(lines: Sequence[str]) -> list[str]:
    """Return one line per path, with all types that occur there."""
    kinds: dict[str, set[str]] = {}
    for line in lines:
        path, _, kind = line.rpartition(": ")
        kinds.setdefault(path, set()).add(kind)
    inside = {path.partition("[]")[0] for path in kinds if "[]." in path}
    return [
        f"{path}: {' or '.join(sorted(found - {'-'})) or 'empty'}"
        for path, found in kinds.items()
        if found - {"-"} or (path.removesuffix("[]") not in inside)
    ]


# Commands and flags


def flags() -> Iterator[str]:
    """Yield every command with its parameters, from typer itself."""
    import typer

    from coordinator.__main__ import app

    yield from _flags_of(typer.main.get_command(app), "brigade")
    worker = importlib.import_module("worker.cli").worker
    alone = typer.Typer()
    alone.command()(worker)
    yield from _flags_of(typer.main.get_command(alone), "python -m worker")


def _flags_of(command: Any, path: str) -> Iterator[str]:
    if command.hidden:
        yield f"{path} (hidden)"
    for parameter in command.params:
        yield f"{path} {_parameter(parameter)}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield f"{path} {name}"
        yield from _flags_of(inner, f"{path} {name}")


def _parameter(parameter: Any) -> str:
    is_option = parameter.opts[0].startswith("-")
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar or parameter.opts[0]]
    facts = [_kind(parameter)]
    for bound, sign in (("min", ">="), ("max", "<=")):
        value = getattr(parameter, bound, None)
        value = getattr(getattr(parameter, "type", None), bound, None) if value is None else value
        if value is not None:
            facts.append(f"{sign} {value}")
    default = parameter.default
    if callable(default):
        default = default()
    default = default.value if isinstance(default, Enum) else default
    if default not in (None, False, ()) or default is True:
        facts.append(f"default {default}")
    facts += [word for word in ("required", "multiple", "hidden") if getattr(parameter, word, False)]
    return f"{' '.join(names)}: {', '.join(facts)}"


def _kind(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(each.value) for each in annotation)
    if get_origin(annotation) is not None and "Literal" in str(get_origin(annotation)):
        return "|".join(map(str, get_args(annotation)))
    is_plain = isinstance(annotation, type) and not get_args(annotation)
    return annotation.__name__ if is_plain else re.sub(r"\w+\.", "", str(annotation))


# Configuration, findings


def fields(schema: Any, known: Json, path: str = "", seen: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield `path: types bounds default` of every field in a JSON schema; `!` follows the name of a required field."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in seen:
            return
        seen, schema = (*seen, name), known[name] | {key: value for key, value in schema.items() if key != "$ref"}
    choices = schema.get("anyOf") or schema.get("oneOf") or [schema]
    kinds = sorted({str(each.get("type", "object" if "$ref" in each else "any")) for each in choices})
    facts = {key: value for each in (*choices, schema) for key, value in each.items() if key in _BOUNDS}
    if schema.get("default") is not None:
        facts["default"] = schema["default"]
    if path:
        yield " ".join([f"{path}: {'|'.join(kinds)}", *(f"{key} {json.dumps(facts[key])}" for key in sorted(facts))])
    required = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        yield from fields(each, known, f"{path}.{name}" + ("!" if name in required else ""), seen)
    for each in choices if choices != [schema] else ():
        yield from (line for line in fields(each, known, path, seen) if not line.startswith(f"{path}: "))
    yield from fields(schema.get("items"), known, f"{path}[]", seen)


_BOUNDS = {
    "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "pattern",
}  # fmt: skip


def kinds() -> Iterator[str]:
    """Yield the keys of cluster.yaml and of `plan --nodes`, and doctor's kinds and levels of findings."""
    workers, coordinators = classes("worker"), classes("coordinator")
    for name, found, keys in (
        ("cluster.yaml", workers, {"workers", "pull_limit"}),
        ("plan --nodes", coordinators, {"nodes", "order"}),
    ):
        [model] = [cls for cls in found if keys <= (getattr(cls, "model_fields", None) or {}).keys()]
        schema = model.model_json_schema()
        yield from (f"{name} {line}" for line in fields(schema, schema.get("$defs", {})))
    for name, value in (("kind", "app-nap"), ("level", "must be mended")):  # the enumerations with a known member
        [values] = {
            tuple(str(each.value) for each in cls)
            for cls in coordinators
            if issubclass(cls, Enum) and value in [each.value for each in cls]
        }
        yield from (f"doctor {name} {each}" for each in values)


def classes(package: str) -> set[Any]:
    """Return all classes of a package's modules."""
    found: list[Any] = []
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # modules for another system
                found += vars(importlib.import_module(module.name)).values()
    return {each for each in found if isinstance(each, type)}


# Commands that are run

_HERE = "--model tiny --local 0"
_FILES = {
    "text.txt": "Tom has 4 apples. He eats one.",
    "wrong.yaml": "workres: []\nlayers: none\n",
    "absent.yaml": "model: demo\nworkers: [{name: ghost, address: '127.0.0.1:1'}]\n",
    "macs.yaml": "nodes: [{name: a, memory: 1GiB, gbps: 1}, {name: b, memory: 1GiB, gbps: 1}]\n",
    "small.yaml": "nodes: [{name: a, memory: 1MiB, gbps: 1}]\n",
}


def exits() -> Iterator[str]:
    """Yield exit codes of a table of command lines, and whether each wrote anything to standard output."""
    write_files()
    for line in (Path(__file__).parent / "invocations.txt").read_text(encoding="utf-8").splitlines():
        done = run_here(*line.split())
        yield f"{done.code}{' prints' if done.out else ''}: brigade {line}"


def write_files() -> None:
    for name, text in _FILES.items():
        Path(name).write_text(text)
    make_talker(Path("tiny"), mask_token_id=0, head_dim=32)  # answers several times as fast as the bundled model


PRINTED = {
    "generate": f"generate {_HERE} -m 4 --json --logprobs 2 Hi",
    "generate, two nodes": "generate --config tiny.yaml -m 4 --json Hi",
    "generate, windows": f"generate {_HERE} -m 8 --json --decode diffusion Hi",
    "generate, journal": f"generate {_HERE} -m 4 --json --journal journal Hi",
    "plan": "plan --model tiny --local 1 --json",
    "plan, Macs that are not there": "plan --nodes macs.yaml --model demo --json",
    "plan, does not fit": "plan --nodes small.yaml --model demo --json",
    "plan, simulated": "plan --simulate --stage-ms 26.5,6.5 --concurrency 1,2 -g 4 --json",
    "verify": "verify --config tiny.yaml --max-tokens 2 --decode ar --json",
    "bench": "bench --config tiny.yaml --concurrency 1 -p 4 -g 4 --decode ar --json",
    "score": f"score {_HERE} --json text.txt",
    "doctor": "doctor --config tiny.yaml --json",
    "status of workers": "status --config there.yaml --json",
    "smoke": "smoke --config tiny.yaml --json",
    "smoke, fails": "smoke --config absent.yaml --model nowhere --json",
    "demo": "demo --local 1 -m 8 --json",
    "nodes": "nodes --timeout 0.1 --config absent.yaml --json",
    "status, no server": "status --config absent.yaml --json",
    "cache ls": "cache ls --json",
    "cache rm": "cache rm --all --json",
}


def printed() -> Iterator[str]:
    """Yield the shapes of --json output."""
    write_files()
    with starting() as start:
        cache = os.environ["XDG_CACHE_HOME"]
        os.environ["XDG_CACHE_HOME"] = f"{cache}-of-mini"  # what it is sent
        worker = start.python("-m", "worker", "--name", "mini", "--bind", "127.0.0.1:0", "--no-announce")
        os.environ["XDG_CACHE_HOME"] = cache
        address = worker.err.wait_match(r"listens on (\S+)\n", WAIT_S)[1]
        for name, model in (("there", "demo"), ("tiny", "tiny")):
            Path(f"{name}.yaml").write_text(f"model: {model}\nworkers: [{{name: mini, address: '{address}'}}]\n")
        for name, line in PRINTED.items():
            done = run_here(*line.split())
            lines = done.out.splitlines()
            if len(lines) != 1:
                yield f"{name}: exit code {done.code}, {len(lines)} lines"
                print(name, done.out, done.err, file=sys.stderr)
                continue
            found = json.loads(lines[0])
            if name == "nodes":  # other workers may announce themselves meanwhile
                found["nodes"] = [node for node in found["nodes"] if node["name"] == "ghost"]
            if found.get("trial"):  # the object of smoke, or null if doctor finds a problem, perhaps of a busy machine
                found["trial"] = None
            told = united([*shapes(found)])
            if name == "doctor":  # machines differ in what is null
                told = [each.rpartition(": ")[0] for each in told]
            yield from (f"{name} {each}" for each in told)


def lines() -> Iterator[str]:
    """Yield the shapes of the lines of bridge and batch."""
    write_files()
    asked: list[Json] = [
        {"id": "a", "op": "generate", "prompt": "Hi", "max_tokens": 4, "temperature": 0},
        {"id": "b", "op": "generate", "prompt_tokens": [5, 6], "max_tokens": 1},
        {"id": 3, "op": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        {"id": "i", "op": "info"},
        {"id": "wrong", "op": "generate", "prompt": "Hi", "max_tokens": 0},
        {"id": "none", "op": "sing"},
        {"op": "info"},
        {"id": "gone", "op": "cancel"},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in asked)
    done = run_here("bridge", *_HERE.split(), stdin=stdin)
    yield f"bridge: exit code {done.code}"
    found: dict[str, list[str]] = {}
    for line in map(json.loads, done.out.splitlines()):
        kind = next((key for key in ("error", "info", "done") if key in line), "piece")
        found.setdefault(f"bridge {line['id']!r} {kind}", []).extend(shapes(line))
    for name, told in found.items():
        yield from (f"{name} {each}" for each in united(told))
    bodies: dict[str, tuple[str, Json]] = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        "completion": ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        "wrong": ("/v1/completions", {"prompt": "Hi", "max_tokens": 0}),
        "elsewhere": ("/v1/embeddings", {"input": "Hi"}),
    }
    asked = [{"custom_id": name, "url": url, "body": body} for name, (url, body) in bodies.items()]
    Path("in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    yield f"batch: exit code {run_here('batch', 'in.jsonl', '-o', 'out.jsonl', *_HERE.split()).code}"
    for line in sorted(map(json.loads, Path("out.jsonl").read_text().splitlines()), key=lambda line: line["custom_id"]):
        yield from (f"batch {line['custom_id']} {each}" for each in united([*shapes(line)]))


# A server


def served() -> Iterator[str]:
    """Yield routes, fields, statuses, errors, streams, metrics and states of a server."""
    from tests.cluster.callers import CHAT, make_caller

    model = make_caller(Path("caller").resolve(), thinks=False)
    _change(model / "tokenizer_config.json", chat_template=CHAT + _THINKS)
    _change(model / "config.json", max_position_embeddings=2048)
    with starting() as start:
        flags = ("--local", "1", "--port", "0", "--served-model-name", "demo")
        server = start.brigade("serve", "--model", model, *flags)
        yield from asked_of(server.err.wait_match(r"serving \S+ at (\S+), ", WAIT_S)[1])
        server.send_signal(signal.SIGINT)
        yield f"exit code of demo: {server.wait(WAIT_S).code} after SIGINT"


def _change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


_THINKS = "{% if messages[-1].content == 'Think.' %}<think>{% endif %}"
SAID = [{"role": "user", "content": "Pick a fox."}]
THINK = [{"role": "user", "content": "Think."}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "pick", "description": "Pick one.", "parameters": SCHEMA}
_GREEDY = {"temperature": 0, "ignore_eos": True}
_SHORT = {"max_tokens": 12, **_GREEDY}
_CALLING = _SHORT | {"max_tokens": 300, "ignore_eos": False}
_THOUGHT = {"messages": THINK, "reasoning_effort": "low"}


_CHAT, _TEXT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
_BODIES: dict[str, Json] = {
    _CHAT: {"model": "demo", "messages": SAID, **_SHORT},
    _TEXT: {"model": "demo", "prompt": "Pick a fox.", **_SHORT, "max_tokens": 8},
    _MESSAGES: {"model": "demo", "messages": SAID, **_SHORT},
    _RESPONSES: {"model": "demo", "input": "Pick a fox.", "max_output_tokens": 12, **_GREEDY},
}


def _asked(path: str, **more: Any) -> tuple[str, Json]:
    return path, _BODIES[path] | more


_chat, _completion, _message, _response = (partial(_asked, path) for path in _BODIES)
_TOOLS: Json = {
    "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required", **_CALLING,
}  # fmt: skip
_ANTHROPIC_TOOLS: Json = {
    "tools": [{"name": "pick", "description": "Pick one.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"}, "max_tokens": 300, "ignore_eos": False,
}  # fmt: skip
_RESPONSES_TOOLS: Json = {
    "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "required", "max_output_tokens": 300,
    "ignore_eos": False,
}  # fmt: skip
STREAMED: dict[str, tuple[str, Json]] = {
    "chat": _chat(),
    "chat, usage": _chat(stream_options={"include_usage": True}),
    "chat, logprobs": _chat(logprobs=True, top_logprobs=1),
    "chat, two answers": _chat(n=2),
    "chat, thought": _chat(**_THOUGHT),
    "chat, tools": _chat(**_TOOLS),
    "chat, waterfall": _chat(brigade={"waterfall": True}),
    "completions": _completion(),
    "completions, usage": _completion(stream_options={"include_usage": True}),
    "completions, logprobs": _completion(logprobs=1),
    "messages": _message(),
    "messages, thought": _message(messages=THINK, thinking={"type": "enabled", "budget_tokens": 1024}),
    "messages, tools": _message(**_ANTHROPIC_TOOLS),
    "responses": _response(),
    "responses, thought": _response(input="Think.", reasoning={"effort": "low"}),
    "responses, tools": _response(**_RESPONSES_TOOLS),
}
WHOLE: dict[str, tuple[str, Json]] = {
    **{name: asked for name, asked in STREAMED.items() if name != "chat, usage" and name != "completions, usage"},
    "completions, two prompts": _completion(prompt=["a", "b"]),
    "completions, ids": _completion(prompt=[5, 6, 7]),
    "completions, echo": _completion(echo=True),
    "completions, echo and logprobs": _completion(echo=True, logprobs=1, max_tokens=1),
    "completions, suffix": _completion(suffix="x"),
    "count tokens": ("/v1/messages/count_tokens", {"model": "demo", "messages": SAID}),
    "score": ("/v1/score", {"model": "demo", "prompt": "Pick", "continuations": [" a fox", [5, 6]]}),
    "classify": ("/v1/classify", {"model": "demo", "prompt": "Pick", "labels": ["a", "b"]}),
    "tokenize": ("/tokenize", {"prompt": "Pick a fox."}),
    "tokenize, chat": ("/tokenize", {"messages": SAID}),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
    "chat, schema": _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        **{"max_tokens": 200, "ignore_eos": False},
    ),
}
_NO_TOOL = {"type": "function", "function": {"name": "x"}}
# beside what tests/unit/api/test_body.py refuses and accepts
REFUSED: dict[str, tuple[str, Json]] = {
    "another model": _chat(model="other"),
    "max_tokens 0": _chat(max_tokens=0, stop=["e", "a", "i", "o"]),  # 0 is no limit
    "max_tokens above what fits": _completion(max_tokens=5_000, stop=["e", "a", "i", "o", " "]),
    "max_tokens far above what fits": _completion(max_tokens=2**31, stop=["e", "a", "i", "o", " "]),
    "a prompt that is too long": _completion(prompt=[5] * 2_049),
    "temperature 200": _chat(temperature=200),
    "top_logprobs alone": _chat(top_logprobs=1),
    "an unknown tool": _chat(tools=_TOOLS["tools"], tool_choice=_NO_TOOL),
    "a schema that is none": _chat(response_format={"type": "json_schema"}),
    "a grammar that is none": _chat(response_format={"type": "grammar", "grammar": "start: ("}),
    "messages without max_tokens": (_MESSAGES, {"model": "demo", "messages": SAID}),
    "messages of another model": _message(model="other"),
    "messages, max_tokens above what fits": _message(max_tokens=5_000, stop_sequences=["e", "a", "o"]),
    "responses of another model": _response(model="other"),
    "classify without choices": ("/v1/classify", {"model": "demo", "prompt": "a"}),
    "no route": ("/v1/embeddings", {"input": "a"}),
}  # fmt: skip


def asked_of(url: str) -> Iterator[str]:
    import httpx2

    with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
        yield from routes(client.get("/openapi.json").json())
        told: dict[str, list[str]] = {}
        for name, (path, body) in WHOLE.items():
            response = client.post(path, json=body)
            yield from refused(f"answer {name}", response)
            if response.status_code == 200:
                told.setdefault(f"answer of {path}", []).extend(shapes(response.json()))
        for name, (path, body) in STREAMED.items():
            response = client.post(path, json=body | {"stream": True})
            yield from refused(f"stream of {name}", response)
            if response.status_code == 200:
                yield from streamed(name, response, told)
        for name, found in sorted(told.items()):
            yield from (f"{name} {each}" for each in united(found))
        for name, (path, body) in REFUSED.items():
            yield from refused(f"asked: {name}", client.post(path, json=body))
        for path in (_CHAT, _MESSAGES, _RESPONSES):
            for told_as, kind, content in (
                ("with no JSON", "application/json", b"{"),
                ("as text", "text/plain", b"{}"),
            ):
                posted = client.post(path, content=content, headers={"content-type": kind})
                yield from refused(f"{path} {told_as}", posted)
            yield from refused(f"GET {path}", client.get(path))
            yield from refused(f"{path} for another host", client.post(path, json={}, headers={"host": "evil.example"}))
        for path in (
            "/",
            "/health",
            "/health?deep=1",
            "/live",
            "/version",
            "/v1/models",
            "/v1/models/demo",
            "/cluster",
        ):
            yield from answer(f"GET {path}", client.get(path))
        yield from refused("GET /v1/models/other", client.get("/v1/models/other"))
        yield from metrics(client.get("/metrics").text)
        [*errors] = client.get("/v1/chat/completions").headers
        yield f"headers of an error: {' '.join(sorted(set(errors) - {'date', 'server', 'content-length'}))}"
    for command in (f"generate --server {url} -m 4 --json Hi", f"status --server {url} --json"):
        done, name = run_here(*command.split()), command.partition(" http")[0]
        yield f"{name}: exit code {done.code}"
        yield from (f"{name} {each}" for each in united([*shapes(json.loads(done.out))]))


def routes(document: Json) -> Iterator[str]:
    """Yield paths with their requests and responses. Whether a field may be null is left out: unit tests ask."""
    known = document["components"]["schemas"]
    found: set[str] = set()
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            start = f"route {method.upper()} {path}"
            found.add(f"{start}: {' '.join(sorted(route['responses']))}")
            for parameter in route.get("parameters", ()):
                found.add(f"{start} {parameter['in']} {parameter['name']}")
            for media, content in route.get("requestBody", {}).get("content", {}).items():
                lines = (line.replace("|null", "").replace("null|", "") for line in fields(content["schema"], known))
                found |= {f"{start} reads {media} {line}" for line in lines}
            for media in route["responses"].get("200", {}).get("content", {}):
                found.add(f"{start} tells {media}")
    yield from sorted(found)


def answer(name: str, response: Any) -> Iterator[str]:
    """Status and shape."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if response.status_code >= 400:
        yield from refused(name, response)
        return
    yield f"{name}: {response.status_code} {kind}"
    if kind == "application/json":
        yield from (f"{name} {each}" for each in united([*shapes(response.json())]))


def refused(name: str, response: Any) -> Iterator[str]:
    """Status and error, without its words."""
    found = response.json() if "json" in response.headers.get("content-type", "") else {}
    error = found.get("error", found) if isinstance(found, dict) and response.status_code >= 400 else {}
    told = " ".join(f"{key}={error[key]}" for key in ("type", "code", "param") if key in error)
    beside = " ".join(header for header in ("retry-after", "x-should-retry") if header in response.headers)
    yield f"{name}: {response.status_code} {told} {beside}".strip()


def events(text: str) -> Iterator[tuple[str, Any]]:
    """Each event of a stream: what kind it is, and its data."""
    for block in text.split("\n\n"):
        name = "".join(line.removeprefix("event: ") for line in block.splitlines() if line.startswith("event: "))
        data = "".join(line.removeprefix("data: ") for line in block.splitlines() if line.startswith("data: "))
        if not data:
            continue
        if data == "[DONE]":
            yield "[DONE]", None
            continue
        found = json.loads(data)
        for label in [*_labels(found)] or [""]:
            yield " ".join(filter(None, (name, label))), found


def _labels(found: Json) -> Iterator[str]:
    if found.get("error"):
        yield "error"
    for choice in found.get("choices", ()):
        delta = choice.get("delta", choice)
        yield from (key for key in ("role", "reasoning", "content", "text", "tool_calls") if delta.get(key))
        if choice.get("finish_reason"):
            yield f"finish={choice['finish_reason']}"
    if found.get("usage") and "choices" in found:
        yield "usage beside a choice" if found["choices"] else "usage"
    for key in ("content_block", "delta", "item", "part"):
        if isinstance(found.get(key), dict) and "type" in found[key]:
            yield f"{key}={found[key]['type']}"


def streamed(name: str, response: Any, told: dict[str, list[str]]) -> Iterator[str]:
    """The order of events of each answer, repeated ones once; their shapes go into `told`."""
    orders: dict[int, list[str]] = {}
    for label, data in events(response.text):
        [*choices] = data.get("choices", ()) if isinstance(data, dict) else ()
        order = orders.setdefault(choices[0]["index"] if choices else 0, [])
        if label and order[-1:] != [label]:
            order.append(label)
        if isinstance(data, dict):
            if "response" in data:  # the same object in several events
                told.setdefault("event response.*", []).extend(shapes(data.pop("response"), ".response"))
            told.setdefault(f"event {data.get('type', data.get('object'))}", []).extend(shapes(data))
    for number, order in sorted(orders.items()):
        yield f"stream of {name}{f', answer {number}' if number else ''}: {' / '.join(order)}"


def metrics(text: str) -> Iterator[str]:
    """Names, types and labels."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, found in re.findall(r"^(\w+)\{([^}]*)\}", text, re.MULTILINE):
        family = name if name in kinds else re.sub(r"_(bucket|sum|count|created|total)$", "", name)
        labels.setdefault(family, set()).update(re.findall(r"(\w+)=", found))
    for name, kind in sorted(kinds.items()):
        yield f"metric {name}: {kind} {','.join(sorted(labels[name]))}".strip()


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    each.__name__: each for each in (flags, kinds, exits, printed, lines, served)
}


def main() -> None:
    """Write SECTION.txt of each section, which runs in a folder of its own and with empty caches."""
    import mlx.core as mx

    import coordinator

    target, *sections = sys.argv[1:]
    target, begun = os.path.abspath(target), time.monotonic()
    clear, main_thread = mx.clear_streams, threading.main_thread()
    # commands that run here must leave the main thread's streams to the next ones
    mx.clear_streams = lambda: None if threading.current_thread() is main_thread else clear()
    for section in sections:
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
            os.chdir(folder)
            Path(target, f"{section}.txt").write_text("".join(f"{line}\n" for line in SECTIONS[section]()))
            os.chdir("/")
    seconds = time.monotonic() - begun
    print(f"{' '.join(sections)} of {Path(coordinator.__path__[0]).parent}: {seconds:.0f} s", file=sys.stderr)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
