"""Prints the surface of the product, a fact per line: `python tests/surface/record.py SECTION` for one of SECTIONS.

It asks whichever checkout Python finds (PYTHONPATH, a virtual environment) and relies on no module but the two that
start a command, so that the same file reads a version before a change and one after it.
"""

import ast
import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin
from unittest import mock

Json = dict[str, Any]
WAIT_S = 180.0  # for anything that a process is to do: no claim is made about time here
_NAMED = r"(versions|tokens_per_s_at|stage_ms|parts_ms|finished|refused)$"  # objects whose keys are data


def shapes(found: Any, path: str = "") -> Iterator[str]:
    """`path: type` of every value inside, those of all entries of a list alike."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from shapes(value, f"{path}.{'*' if re.search(_NAMED, path.removesuffix('[]')) else key}")
    elif isinstance(found, list):
        if not found:
            yield f"{path}[]: -"
        for each in found:
            yield from shapes(each, f"{path}[]")
    else:
        kind = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}[type(found)]
        yield f"{path}: {kind}"


def united(lines: Sequence[str]) -> list[str]:
    """One line per path, with all types that were seen there."""
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
    """Every command with its parameters, from typer itself."""
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


# Configuration, findings, environment


def config() -> Iterator[str]:
    """Keys of cluster.yaml, and of the Macs of `plan --nodes`, with types and defaults."""
    sections = {
        "cluster.yaml": ("worker", {"workers", "pull_limit"}),
        "plan --nodes": ("coordinator", {"nodes", "order"}),
    }
    for name, (package, keys) in sections.items():
        [found] = {cls for cls in _classes(package) if keys <= (getattr(cls, "model_fields", None) or {}).keys()}
        yield from (f"{name} {line}" for line in _keys_of(found.model_json_schema()))


def _keys_of(schema: Json) -> Iterator[str]:
    """Every key with its kind, bounds and default; names of classes left out."""
    known = schema.get("$defs", {})

    def inside(each: Json, path: str) -> Iterator[str]:
        if "$ref" in each:
            each = {**known[each["$ref"].rpartition("/")[2]], **{k: v for k, v in each.items() if k != "$ref"}}
        choices = [known[c["$ref"].rpartition("/")[2]] if "$ref" in c else c for c in each.get("anyOf", [each])]
        if path:
            yield f"{path}: {' or '.join(map(_said, choices))}" + (
                f" = {json.dumps(each['default'])}" if "default" in each and each["default"] is not None else ""
            )
        for choice in choices:
            required = choice.get("required", ())
            for key, value in choice.get("properties", {}).items():
                yield from inside(value, f"{path}.{key}" + ("!" if key in required else ""))
            if "items" in choice:
                yield from inside(choice["items"], f"{path}[]")

    yield from inside(schema, "")


def _said(choice: Json) -> str:
    words = [str(choice.get("type", "any"))]
    words += [f"{name} {json.dumps(choice[name])}" for name in sorted(choice) if name in _BOUNDS]
    return " ".join(words)


_BOUNDS = {
    "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "pattern",
}  # fmt: skip


def kinds() -> Iterator[str]:
    """Both: they need every module."""
    yield from config()
    yield from findings()


def findings() -> Iterator[str]:
    """Kinds and levels of what doctor says, by their values: the enumerations that hold two well-known ones."""
    for name, value in (("kind", "app-nap"), ("level", "must be mended")):
        found = {
            cls
            for cls in _classes("coordinator")
            if isinstance(cls, type) and issubclass(cls, Enum) and value in [each.value for each in cls]
        }
        [values] = {tuple(str(each.value) for each in cls) for cls in found}
        yield from (f"doctor {name} {each}" for each in values)


def environment() -> Iterator[str]:
    """Variables that are read or set, from the sources."""
    found: set[str] = set()
    for package in ("coordinator", "worker"):
        root = Path(importlib.import_module(package).__path__[0])
        for file in root.rglob("*.py"):
            if "environ" in (text := file.read_text(encoding="utf-8")):
                found |= _variables(ast.parse(text))
    yield from sorted(found - {"NONE"})  # a value


def _variables(tree: ast.Module) -> set[str]:
    """Constants with which `environ` is read, by themselves or by the name of a constant of the module."""
    constants = {
        target.id: {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.expr | ast.Assign | ast.Return) or "environ" not in ast.unparse(statement):
            continue
        for node in ast.walk(statement):
            values = constants.get(node.id, set()) if isinstance(node, ast.Name) else set()
            values = {node.value} if isinstance(node, ast.Constant) else values
            found |= {value for value in values if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z_]{2,}", value)}
    return found


def _classes(package: str) -> set[Any]:
    """All classes of a package's modules."""
    found = set()
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # what another system has
                found |= {
                    each for each in vars(importlib.import_module(module.name)).values() if isinstance(each, type)
                }
    return found


# Commands that are run


def run_command(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and error of a command that runs in this process."""
    import mlx.core as mx

    import coordinator.__main__ as program

    out, err = io.StringIO(), io.StringIO()
    typed = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    runner = sys.modules[program.run_command.__module__]
    clear = mx.clear_streams

    def clear_elsewhere() -> None:
        if threading.current_thread() is not threading.main_thread():
            clear()

    with (
        mock.patch.object(sys, "argv", ["brigade", *arguments]),
        mock.patch.object(sys, "stdin", typed),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
        mock.patch.object(mx, "clear_streams", clear_elsewhere),
        mock.patch.object(runner, "calls_are_left", lambda: False, create=True),
    ):
        try:
            program.run_command(program.app)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


_HERE = "--model demo --local 0"
_ONE = f"generate {_HERE} -m 2"
INVOCATIONS = f"""
--version
--help
-h
generate -h
keys
cache
geenrate
generate --no-such-flag
{_ONE} Hi
{_ONE} -p Hi
{_ONE} --raw Hi
{_ONE} --prompt-tokens 1,2,3
{_ONE} --temp 0 Hi
{_ONE} --temp 0 --top-p 0.5 Hi
{_ONE} --temp 0 --seed 3 Hi
{_ONE} --logprobs 2 Hi
{_ONE} --json --stats Hi
{_ONE} --raw --system-prompt Be Hi
{_ONE} --prompt-tokens 1,2 --raw
{_ONE} --prompt-tokens 1,2 --system-prompt Be
{_ONE} --decode ar --window 4 Hi
{_ONE} --decode ngram --window 4 Hi
{_ONE} --decode ar --entropy-threshold 0.5 Hi
{_ONE} --decode ar Hi
{_ONE} --decode ngram Hi
{_ONE} --decode diffusion Hi
{_ONE} --decode diffusion-fast Hi
{_ONE} --decode draft Hi
{_ONE} --decode canvas Hi
{_ONE} --decode other Hi
{_ONE} --kv full Hi
{_ONE} --kv rotating Hi
{_ONE} --kv rotating --max-kv-size 64 Hi
{_ONE} --kv int8 Hi
{_ONE} --max-kv-size 64 Hi
{_ONE} --stop x --stop y Hi
{_ONE} --ignore-eos Hi
{_ONE} --repeat-guard 2 Hi
{_ONE} --temp 1 --seed 3 --top-p 0.9 --top-k 5 --min-p 0.1 --repetition-penalty 1.1 Hi
{_ONE}
{_ONE} -p Hi Hi
{_ONE} -p Hi --prompt-tokens 1
{_ONE} --prompt-tokens 1,x
{_ONE} --prompt-tokens 1,99999
{_ONE} --prompt-tokens=-5
generate {_HERE} --max-tokens 0 Hi
generate {_HERE} --max-tokens many Hi
generate {_HERE} -m 99999 --prompt-tokens 1,2,3 --decode ar --stop e
{_ONE} --temp -1 Hi
{_ONE} --temp nan Hi
{_ONE} --top-p 2 Hi
{_ONE} --top-k -1 Hi
{_ONE} --seed -1 Hi
{_ONE} --logit-bias 5 Hi
{_ONE} --logprobs 21 --json Hi
{_ONE} --trace nowhere/trace.json Hi
{_ONE} --journal nowhere/journal Hi
{_ONE} --stop= Hi
{_ONE} --temp 0 --temp 0 Hi
generate --model nowhere --local 0 Hi
generate --model demo --local some Hi
generate --model demo --local 17 Hi
generate --model demo --local 1 --layers 4,4,4 -m 2 Hi
generate --model demo --local 1 --layers 8,0 -m 2 Hi
generate --model demo --local 1 --layers two,2 -m 2 Hi
generate --config nowhere.yaml Hi
generate --config wrong.yaml Hi
generate --config wrong.yaml --local 0 --model demo -m 2 Hi
generate --config absent.yaml -m 2 Hi
generate --server http://127.0.0.1:1 Hi
generate --server http://127.0.0.1:1 --model demo Hi
generate --server nonsense Hi
generate --api-key-file nowhere Hi
plan --model demo --local 1
plan --model demo --local 1 --layers 4,4
plan --model demo --nodes nowhere
plan --nodes macs.yaml --model demo
plan --nodes macs.yaml --model demo --local 1
plan --nodes small.yaml --model demo
plan --simulate --stage-ms 26.5,6.5 --concurrency 1 -g 2
plan --stage-ms 26.5,6.5
plan --model nowhere
verify --model demo --local 0 --max-tokens 0
verify --model demo --local 0 --decode other
bench --model demo --local 0 --concurrency 0
bench --model demo --local 0 -g 0
bench --model demo --local 0 --plot nowhere/plot.png
status --server http://127.0.0.1:1
status --config absent.yaml
status --config nowhere.yaml
doctor --config nowhere.yaml
score {_HERE} text.txt
score {_HERE} nowhere.txt
score --model demo --local 0 --json text.txt
batch nowhere.jsonl -o out.jsonl {_HERE}
batch text.txt
bridge {_HERE}
bridge --model nowhere --local 0
serve --model nowhere --local 0
serve {_HERE} --context 1
serve {_HERE} --temp -1
serve {_HERE} --host 0.0.0.0
serve {_HERE} --port 70000
serve {_HERE} --tls-cert text.txt
serve {_HERE} --api-key-file nowhere
serve {_HERE} --cors-origin nope
chat {_HERE} -m 0
chat --server http://127.0.0.1:1
chat {_HERE}
smoke --config nowhere.yaml
smoke --model demo --local 0
demo --local 17
nodes --timeout 0
nodes --config nowhere.yaml
init --config absent.yaml --yes
init --model nowhere --yes
keys init
keys init
keys init --replace
keys issue mini
keys issue my/mac
keys issue
launch
launch --config absent.yaml
launch --config absent.yaml nobody
launch --stop --restart
launch --stop --update --config absent.yaml
logs
logs mini
logs mini --config absent.yaml
cache ls
cache rm
cache rm --all
cache rm nothing
worker --bind elsewhere
worker --bind 0.0.0.0:0
worker --name my/mac --bind 127.0.0.1:0
worker --config absent.yaml --name nobody
worker --config nowhere.yaml
worker --bnid 1
worker --keys nowhere
""".strip().splitlines()
_FILES = {
    "text.txt": "Tom has 4 apples. He eats one.",
    "wrong.yaml": "workres: []\nlayers: none\n",
    "absent.yaml": "model: demo\nworkers: [{name: ghost, address: '127.0.0.1:1'}]\n",
    "macs.yaml": "nodes: [{name: a, memory: 1GiB, gbps: 1}, {name: b, memory: 1GiB, gbps: 1}]\n",
    "small.yaml": "nodes: [{name: a, memory: 1MiB, gbps: 1}]\n",
}


def exits() -> Iterator[str]:
    """Exit codes of a table of command lines, and whether each wrote anything to standard output."""
    for name, text in _FILES.items():
        Path(name).write_text(text)
    for line in INVOCATIONS:
        code, out, _ = run_command(*line.split())
        yield f"{code}{' prints' if out else ''}: brigade {line}"


def signals() -> Iterator[str]:
    """Exit codes of processes that are told to end."""
    endless = ("generate", *_HERE.split(), "--ignore-eos", "-m", "2000", "--decode", "ar", "--temp", "1", "Hi")
    for name, arguments, sign, number in (
        ("generate", ("-m", "coordinator", *endless), rb".", signal.SIGINT),
        ("serve", ("-m", "coordinator", "serve", *_HERE.split(), "--port", "0"), rb"serving .*\n", signal.SIGINT),
        ("serve", ("-m", "coordinator", "serve", *_HERE.split(), "--port", "0"), rb"serving .*\n", signal.SIGTERM),
        ("worker", ("-m", "worker", "--bind", "127.0.0.1:0", "--no-announce"), rb"listens on", signal.SIGTERM),
        ("worker", ("-m", "worker", "--bind", "127.0.0.1:0", "--no-announce"), rb"listens on", signal.SIGINT),
    ):
        with Process(*arguments) as process:
            process.wait_for(sign, is_error=name != "generate")
            process.popen.send_signal(number)
            yield f"{process.popen.wait(WAIT_S)}: {name} after {number.name}"


class Process:
    """A process of the product, ended at the latest when it is left."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._texts = {True: bytearray(), False: bytearray()}
        self._changed = threading.Condition()
        for is_error, pipe in ((True, self.popen.stderr), (False, self.popen.stdout)):
            threading.Thread(target=self._read, args=(pipe, is_error), daemon=True).start()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(WAIT_S)

    def wait_for(self, pattern: bytes, *, is_error: bool = True) -> "re.Match[bytes]":
        text = self._texts[is_error]
        with self._changed:
            self._changed.wait_for(lambda: re.search(pattern, text) or self.popen.poll() is not None, WAIT_S)
        match = re.search(pattern, text)
        if not match:
            raise SystemExit(f"no {pattern!r} from {self.popen.args}: {dict(self._texts)}")
        return match

    def _read(self, pipe: Any, is_error: bool) -> None:
        while piece := os.read(pipe.fileno(), 65536):
            with self._changed:
                self._texts[is_error] += piece
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


PRINTED = {
    "generate": f"generate {_HERE} -m 4 --json --logprobs 2 Hi",
    "generate, two nodes": "generate --model demo --local 1 -m 4 --json Hi",
    "generate, windows": f"generate {_HERE} -m 8 --json --decode diffusion Hi",
    "generate, journal": f"generate {_HERE} -m 4 --json --journal journal Hi",
    "plan": "plan --model demo --local 1 --json",
    "plan, Macs that are not there": "plan --nodes macs.yaml --model demo --json",
    "plan, does not fit": "plan --nodes small.yaml --model demo --json",
    "plan, simulated": "plan --simulate --stage-ms 26.5,6.5 --concurrency 1,2 -g 4 --json",
    "verify": "verify --model demo --local 1 --max-tokens 2 --decode ar --json",
    "bench": "bench --model demo --local 1 --concurrency 1 -p 4 -g 4 --decode ar --json",
    "score": f"score {_HERE} --json text.txt",
    "doctor": "doctor --config there.yaml --json",
    "status of workers": "status --config there.yaml --json",
    "smoke": "smoke --model demo --local 1 --json",
    "smoke, fails": "smoke --config absent.yaml --json",
    "demo": "demo --local 1 -m 8 --json",
    "nodes": "nodes --timeout 0.1 --config absent.yaml --json",
    "status, no server": "status --config absent.yaml --json",
    "cache ls": "cache ls --json",
    "cache rm": "cache rm --all --json",
}


def printed() -> Iterator[str]:
    """Shapes of what --json prints."""
    for name, text in _FILES.items():
        Path(name).write_text(text)
    with Process("-m", "worker", "--name", "mini", "--bind", "127.0.0.1:0", "--no-announce") as worker:
        address = worker.wait_for(rb"listens on (\S+)\n")[1].decode()
        Path("there.yaml").write_text(f"model: demo\nworkers: [{{name: mini, address: '{address}'}}]\n")
        for name, line in PRINTED.items():
            code, out, err = run_command(*line.split())
            lines = out.splitlines()
            if len(lines) != 1:
                yield f"{name}: exit code {code}, {len(lines)} lines"
                print(name, out, err, file=sys.stderr)
                continue
            found = json.loads(lines[0])
            if name == "nodes":  # others may announce themselves meanwhile
                found["nodes"] = [node for node in found["nodes"] if node["name"] == "ghost"]
            told = united([*shapes(found)])
            if name == "doctor":  # what is null differs by machine
                told = [each.rpartition(": ")[0] for each in told]
            yield from (f"{name} {each}" for each in told)


def lines() -> Iterator[str]:
    """Shapes of the lines of bridge and batch."""
    asked = [
        {"id": "a", "op": "generate", "prompt": "Hi", "max_tokens": 4, "temperature": 0},
        {"id": "b", "op": "generate", "prompt_tokens": [5, 6], "max_tokens": 2},
        {"id": 3, "op": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        {"id": "i", "op": "info"},
        {"id": "wrong", "op": "generate", "prompt": "Hi", "max_tokens": 0},
        {"id": "none", "op": "sing"},
        {"op": "info"},
        {"id": "gone", "op": "cancel"},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in asked)
    code, out, _ = run_command("bridge", *_HERE.split(), stdin=stdin)
    yield f"bridge: exit code {code}"
    found: dict[str, list[str]] = {}
    for line in map(json.loads, out.splitlines()):
        kind = next((key for key in ("error", "info", "done") if key in line), "piece")
        found.setdefault(f"bridge {line['id']!r} {kind}", []).extend(shapes(line))
    for name in sorted(found):
        yield from (f"{name} {each}" for each in united(found[name]))
    bodies: dict[str, tuple[str, Json]] = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        "completion": ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        "wrong": ("/v1/completions", {"prompt": "Hi", "max_tokens": 0}),
        "elsewhere": ("/v1/embeddings", {"input": "Hi"}),
    }
    Path("in.jsonl").write_text(
        "".join(
            json.dumps({"custom_id": name, "url": url, "body": body}) + "\n" for name, (url, body) in bodies.items()
        )
    )
    code, _, _ = run_command("batch", "in.jsonl", "-o", "out.jsonl", *_HERE.split())
    yield f"batch: exit code {code}"
    for line in sorted(map(json.loads, Path("out.jsonl").read_text().splitlines()), key=lambda line: line["custom_id"]):
        yield from (f"batch {line['custom_id']} {each}" for each in united([*shapes(line)]))


# A server


def served() -> Iterator[str]:
    """Routes, fields, statuses, errors, streams, metrics and states of a server, and of one whose worker is lost."""
    from tests.cluster.callers import make_caller

    model = make_caller(Path("caller"), thinks=False)
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": settings["chat_template"] + _THINKS}))
    serve = ("-m", "coordinator", "serve", "--local", "1", "--port", "0", "--recovery-timeout", "0", "--model")
    with Process(*serve, "demo") as demo, Process(*serve, str(model), "--served-model-name", "caller") as caller:
        urls = {
            name: process.wait_for(rb"serving \S+ at (\S+), ")[1].decode()
            for name, process in (("demo", demo), ("caller", caller))
        }
        yield from asked_of(urls)
        yield from after_a_loss(urls["caller"], caller.popen.pid)
        for name, process in (("demo", demo), ("caller", caller)):
            process.popen.send_signal(signal.SIGINT)
            yield f"exit code of {name}: {process.popen.wait(WAIT_S)} after SIGINT"


_THINKS = "{% if enable_thinking or reasoning_effort %}<think>{% endif %}"
SAID = [{"role": "user", "content": "Pick a fox."}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "pick", "description": "Pick one.", "parameters": SCHEMA}
_SHORT = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
_CALLING = _SHORT | {"max_tokens": 300, "ignore_eos": False}
_THOUGHT = {"model": "caller", "max_tokens": 60, "reasoning_effort": "low"}


def _chat(**more: Any) -> Json:
    return {"model": "demo", "messages": SAID, **_SHORT, **more}


def _message(**more: Any) -> Json:
    return {"model": "demo", "messages": SAID, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


def _response(**more: Any) -> Json:
    return {
        "model": "demo",
        "input": "Pick a fox.",
        "max_output_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


def _completion(**more: Any) -> Json:
    return {"model": "demo", "prompt": "Pick a fox.", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}


_CHAT, _TEXT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
_TOOLS: Json = {
    "model": "caller",
    "tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required", **_CALLING,
}  # fmt: skip
_ANTHROPIC_TOOLS: Json = {
    "model": "caller",
    "tools": [{"name": "pick", "description": "Pick one.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any"}, "max_tokens": 300, "ignore_eos": False,
}  # fmt: skip
_RESPONSES_TOOLS: Json = {
    "model": "caller",
    "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "required", "max_output_tokens": 300,
    "ignore_eos": False,
}  # fmt: skip
STREAMED: dict[str, tuple[str, Json]] = {
    "chat": (_CHAT, _chat()),
    "chat, usage": (_CHAT, _chat(stream_options={"include_usage": True})),
    "chat, logprobs": (_CHAT, _chat(logprobs=True, top_logprobs=1)),
    "chat, two answers": (_CHAT, _chat(n=2)),
    "chat, thought": (_CHAT, _chat(**_THOUGHT)),
    "chat, tools": (_CHAT, _chat(**_TOOLS)),
    "chat, waterfall": (_CHAT, _chat(brigade={"waterfall": True})),
    "completions": (_TEXT, _completion()),
    "completions, usage": (_TEXT, _completion(stream_options={"include_usage": True})),
    "completions, logprobs": (_TEXT, _completion(logprobs=1)),
    "messages": (_MESSAGES, _message()),
    "messages, thought": (
        _MESSAGES,
        _message(model="caller", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000),
    ),
    "messages, tools": (_MESSAGES, _message(**_ANTHROPIC_TOOLS)),
    "responses": (_RESPONSES, _response()),
    "responses, thought": (_RESPONSES, _response(model="caller", reasoning={"effort": "low"})),
    "responses, tools": (_RESPONSES, _response(**_RESPONSES_TOOLS)),
}
WHOLE: dict[str, tuple[str, Json]] = {
    **{name: asked for name, asked in STREAMED.items() if name != "chat, usage" and name != "completions, usage"},
    "completions, two prompts": (_TEXT, _completion(prompt=["a", "b"])),
    "completions, ids": (_TEXT, _completion(prompt=[5, 6, 7])),
    "completions, echo": (_TEXT, _completion(echo=True)),
    "completions, echo and logprobs": (_TEXT, _completion(echo=True, logprobs=1, max_tokens=1)),
    "completions, suffix": (_TEXT, _completion(suffix="x")),
    "count tokens": ("/v1/messages/count_tokens", {"model": "demo", "messages": SAID}),
    "score": ("/v1/score", {"model": "demo", "prompt": "Pick", "continuations": [" a fox", [5, 6]]}),
    "classify": ("/v1/classify", {"model": "demo", "prompt": "Pick", "labels": ["a", "b"]}),
    "tokenize": ("/tokenize", {"prompt": "Pick a fox."}),
    "tokenize, chat": ("/tokenize", {"messages": SAID}),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
    "chat, schema": (
        _CHAT,
        _chat(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            **{"max_tokens": 200, "ignore_eos": False},
        ),
    ),
}
_IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
_NO_TOOL = {"type": "function", "function": {"name": "x"}}
REFUSED: dict[str, tuple[str, Json]] = {
    "no messages": (_CHAT, {"model": "demo"}),
    "empty messages": (_CHAT, _chat(messages=[])),
    "another model": (_CHAT, _chat(model="other")),
    "unknown field": (_CHAT, _chat(no_such_field=1)),
    "max_tokens 0": (_CHAT, _chat(max_tokens=0)),
    "max_tokens above what fits": (_TEXT, _completion(max_tokens=5_000, stop=["e", "a", "i", "o", " "])),
    "max_tokens far above what fits": (_TEXT, _completion(max_tokens=2**31, stop=["e", "a", "i", "o", " "])),
    "a prompt that is too long": (_TEXT, _completion(prompt=[5] * 2_049)),
    "temperature 200": (_CHAT, _chat(temperature=200)),
    "temperature null": (_CHAT, _chat(temperature=None)),
    "all nulls": (_CHAT, {"model": "demo", "messages": SAID, "max_tokens": 2} | dict.fromkeys(
        ("stop", "stream", "stream_options", "n", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
         "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format", "seed", "top_p", "user"))),
    "completions with nulls": (_TEXT, {"model": "demo", "prompt": "a", "max_tokens": 2} | dict.fromkeys(
        ("stop", "stream", "n", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "echo", "suffix",
         "best_of", "seed", "top_p", "user"))),
    "n 0": (_CHAT, _chat(n=0)),
    "top_logprobs alone": (_CHAT, _chat(top_logprobs=1)),
    "an image": (_CHAT, _chat(messages=[{"role": "user", "content": [_IMAGE]}])),
    "a tool of another type": (_CHAT, _chat(tools=[{"type": "search"}])),
    "an unknown tool": (_CHAT, _chat(tools=_TOOLS["tools"], tool_choice=_NO_TOOL)),
    "a schema that is none": (_CHAT, _chat(response_format={"type": "json_schema"})),
    "a grammar that is none": (_CHAT, _chat(response_format={"type": "grammar", "grammar": "start: ("})),
    "messages without max_tokens": (_MESSAGES, {"model": "demo", "messages": SAID}),
    "messages of another model": (_MESSAGES, _message(model="other")),
    "messages, unknown field": (_MESSAGES, _message(no_such_field=1)),
    "messages, max_tokens above what fits": (_MESSAGES, _message(max_tokens=5_000, stop_sequences=["e", "a", "o"])),
    "responses without input": (_RESPONSES, {"model": "demo"}),
    "responses of another model": (_RESPONSES, _response(model="other")),
    "responses, store": (_RESPONSES, _response(previous_response_id="x")),
    "no prompt": (_TEXT, {"model": "demo"}),
    "completions, best_of": (_TEXT, _completion(best_of=3)),
    "score without text": ("/v1/score", {}),
    "classify without choices": ("/v1/classify", {"model": "demo", "prompt": "a"}),
    "detokenize a word": ("/detokenize", {"tokens": ["a"]}),
    "no route": ("/v1/embeddings", {"input": "a"}),
}  # fmt: skip


def asked_of(urls: dict[str, str]) -> Iterator[str]:
    import httpx2

    url = urls["demo"]
    with httpx2.Client(base_url=url, timeout=WAIT_S) as client, httpx2.Client(base_url=urls["caller"]) as caller:
        caller.timeout = WAIT_S
        yield from routes(client.get("/openapi.json").json())
        told: dict[str, list[str]] = {}
        for name, (path, body) in WHOLE.items():
            asked = caller if body.get("model") == "caller" else client
            response = asked.post(path, json=body)
            yield from refused(f"answer {name}", response)
            if response.status_code == 200:
                told.setdefault(f"answer of {path}", []).extend(shapes(response.json()))
        for name, (path, body) in STREAMED.items():
            asked = caller if body.get("model") == "caller" else client
            response = asked.post(path, json=body | {"stream": True})
            yield from refused(f"stream of {name}", response)
            if response.status_code == 200:
                yield from streamed(name, response, told)
        for name, found in sorted(told.items()):
            yield from (f"{name} {each}" for each in united(found))
        for name, (path, body) in REFUSED.items():
            yield from refused(f"asked: {name}", client.post(path, json=body))
        for path in (_CHAT, _MESSAGES, _RESPONSES):
            json_type = {"content-type": "application/json"}
            yield from refused(f"{path} with no JSON", client.post(path, content=b"{", headers=json_type))
            yield from refused(
                f"{path} as text", client.post(path, content=b"{}", headers={"content-type": "text/plain"})
            )
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
    for name, line in {
        "generate --server": f"generate --server {url} -m 4 --json Hi",
        "status --server": f"status --server {url} --json",
    }.items():
        code, out, _ = run_command(*line.split())
        yield f"{name}: exit code {code}"
        yield from (f"{name} {each}" for each in united([*shapes(json.loads(out))]))


def after_a_loss(url: str, pid: int) -> Iterator[str]:
    """What a stream says whose worker is killed, and what the server says then."""
    import httpx2
    import psutil

    def workers() -> list[psutil.Process]:
        return [each for each in psutil.Process(pid).children(recursive=True) if "worker" in each.cmdline()]

    [worker] = workers()
    endless = {"max_tokens": 30_000}
    streams = {
        "chat": (_CHAT, _chat(**endless)),
        "completions": (_TEXT, _completion(**endless)),
        "messages": (_MESSAGES, _message(**endless)),
        "responses": (_RESPONSES, _response(max_output_tokens=30_000)),
    }
    texts: dict[str, bytearray] = {}
    has_begun = {name: threading.Event() for name in streams}

    def read(name: str) -> None:
        path, body = streams[name]
        texts[name] = bytearray()
        body |= {"model": "caller", "stream": True}
        with httpx2.stream("POST", url + path, json=body, timeout=WAIT_S) as found:
            for piece in found.iter_bytes():
                texts[name] += piece
                if texts[name].count(b"\n\n") >= 6:
                    has_begun[name].set()
            has_begun[name].set()

    threads = [threading.Thread(target=read, args=(name,)) for name in streams]
    for thread in threads:
        thread.start()
    for event in has_begun.values():
        event.wait(WAIT_S)
    worker.kill()
    for thread in threads:
        thread.join(WAIT_S)
    for name, text in texts.items():
        found = [*events(text.decode())]
        yield f"lost stream of {name}: ends with {' / '.join(label for label, _ in found[-2:])}"
        [*errors] = [data for _, data in found if isinstance(data, dict) and ("error" in json.dumps(data))]
        yield from (f"lost stream of {name}: {each}" for each in united([*shapes(errors[-1])]))


def routes(document: Json) -> Iterator[str]:
    """Paths with what they read and tell. Whether a field may be null is not told: REFUSED asks."""

    def inside(schema: Any, path: str, seen: tuple[str, ...]) -> Iterator[str]:
        if not isinstance(schema, dict):
            return
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name in seen:
                return
            seen, schema = (
                (*seen, name),
                document["components"]["schemas"][name]
                | {key: value for key, value in schema.items() if key != "$ref"},
            )
        choices = schema.get("anyOf") or schema.get("oneOf") or [schema]
        required = schema.get("required", ())
        kinds = sorted({str(each.get("type", "object" if "$ref" in each else "any")) for each in choices} - {"null"})
        facts = {key: value for each in (*choices, schema) for key, value in each.items() if key in _BOUNDS}
        if schema.get("default") is not None:
            facts["default"] = schema["default"]
        bounds = [f"{key} {json.dumps(facts[key])}" for key in sorted(facts)]
        if path:
            yield f"{path}: {' '.join(['|'.join(kinds), *bounds])}"
        for name, each in schema.get("properties", {}).items():
            yield from inside(each, f"{path}.{name}" + ("!" if name in required else ""), seen)
        for each in choices if choices != [schema] else ():
            yield from (line for line in inside(each, path, seen) if not line.startswith(f"{path}: "))
        yield from inside(schema.get("items"), f"{path}[]", seen)

    found: set[str] = set()
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            start = f"route {method.upper()} {path}"
            found.add(f"{start}: {' '.join(sorted(route['responses']))}")
            for parameter in route.get("parameters", ()):
                found.add(f"{start} {parameter['in']} {parameter['name']}")
            for media, content in route.get("requestBody", {}).get("content", {}).items():
                found |= {f"{start} reads {media} {line}" for line in inside(content["schema"], "", ())}
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
    "flags": flags,
    "kinds": kinds,
    "environment": environment,
    "exits": exits,
    "signals": signals,
    "printed": printed,
    "lines": lines,
    "served": served,
}


def main() -> None:
    """Print one section; it runs in a folder of its own, with nothing in any cache."""
    begun = time.monotonic()
    section = SECTIONS[sys.argv[1]]
    out = sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
        os.chdir(folder)
        for line in section():
            print(line, file=out, flush=True)
        os.chdir("/")
    import coordinator

    print(f"{sys.argv[1]} of {Path(coordinator.__path__[0]).parent}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
