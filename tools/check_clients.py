"""Agents and libraries that no one here wrote, each with a real tool, on a server of this command's own.

python -m tools.check_clients [NAME ...] [--environments FOLDER] [--markdown docs/clients.md]

The model is tiny and random, so a proxy makes it call: it sets the choice of tools to `required` until a tool has run,
then to `none`, and changes nothing else. A client has passed if it ran a tool with arguments of the tool's schema, sent
the result back, and ended with 0. Each is installed in an environment of its own, and has a home folder of its own.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import venv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil
import typer

from tools import random_model
from tools.serve_client import brigade
from worker.errors import InputError
from worker.platform.run import run_command
from worker.platform.text import Json

_PROMPT = "Read the file notes.txt and tell me what it says."
_INSTALL_S, _RUN_S = 600.0, 300.0
_NODE = "node@22"  # some clients need a newer one than the machine may have
_VALIDATOR = "jsonschema"
_VALIDATE = """
import json, sys, jsonschema
for schema, arguments in json.load(sys.stdin):
    jsonschema.validate(json.loads(arguments), schema)
"""
_TOOL = 'def read_file(path: str) -> str:\n    "Read a file."\n    return f"{path} is empty"\n'


@dataclass(frozen=True)
class Client:
    """A package, and how to use it: in texts `{url}`, `{home}`, `{bin}` and `{prompt}` are replaced."""

    package: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # by name, in the folder that it runs in
    prepare: tuple[str, ...] = ()  # a command before
    is_npm: bool = False
    has_tools: bool = True


_PYTHON = "{bin}/python"
# Of Continue's tools, all that do not read files: `Exit` ends it at once.
_NOT_CONTINUED = ("Bash", "Fetch", "Checklist", "CheckBackgroundJob", "AskQuestion", "Exit", "Skills")
CLIENTS = [
    Client(
        "aider-chat",
        (
            "{bin}/aider", "--model", "openai/brigade", "--openai-api-base", "{url}/v1", "--message", "{prompt}",
            "--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings",
            "--no-show-release-notes", "--no-detect-urls", "--no-suggest-shell-commands", "notes.txt",
        ),
        {"OPENAI_API_KEY": "none"},
        has_tools=False,
    ),
    Client(
        "litellm",
        (_PYTHON, str(Path(__file__).with_name("litellm_requests.py")), "{url}", "{prompt}"),
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Client(
        "llm",
        (
            "{bin}/llm", "prompt", "{prompt}", "-m", "brigade", "--functions", "tool.py", "--no-log",
            "-o", "max_tokens", "400",
        ),
        {"LLM_USER_PATH": ".", "OPENAI_API_KEY": "none"},
        {
            "tool.py": _TOOL,
            "extra-openai-models.yaml": json.dumps(
                [{"model_id": "brigade", "model_name": "brigade", "api_base": "{url}/v1", "supports_tools": True}]
            ),
        },
    ),
    Client("langchain-openai", (_PYTHON, str(Path(__file__).with_name("langchain_requests.py")), "{url}", "{prompt}")),
    Client(
        "@anthropic-ai/claude-code",
        ("{bin}/claude", "-p", "{prompt}", "--tools", "Read", "--allowedTools", "Read"),
        {
            "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "brigade",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "400", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        is_npm=True,
    ),
    Client(
        "@openai/codex",
        (
            "{bin}/codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only", "--model", "brigade",
            "-c", "model_provider=brigade",
            "-c", 'model_providers.brigade={name="brigade",base_url="{url}/v1",wire_api="responses"}', "{prompt}",
        ),
        is_npm=True,
    ),
    Client(
        "opencode-ai",
        ("{bin}/opencode", "run", "{prompt}"),
        {f"OPENCODE_DISABLE_{name}": "1" for name in ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD")},
        {
            "opencode.json": json.dumps({
                "model": "brigade/brigade", "small_model": "brigade/brigade", "share": "disabled",
                "provider": {"brigade": {
                    "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                    "models": {"brigade": {"limit": {"context": 65536, "output": 400}}},
                }},
                "tools": {"*": False, "read": True},
            })
        },
        is_npm=True,
    ),
    Client(
        "cline",
        ("{bin}/cline", "--plan", "-P", "openai-compatible", "-m", "brigade", "{prompt}"),
        prepare=("{bin}/cline", "auth", "-p", "openai-compatible", "-k", "none", "-m", "brigade", "-b", "{url}/v1"),
        is_npm=True,
    ),
    Client(
        "@continuedev/cli",
        (
            "{bin}/cn", "-p", "{prompt}", "--config", "config.yaml",
            *(word for name in _NOT_CONTINUED for word in ("--exclude", name)),
        ),
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {
            "config.yaml": json.dumps({
                "name": "brigade", "version": "0.0.1", "schema": "v1",
                "models": [{
                    "name": "brigade", "provider": "openai", "model": "brigade", "apiBase": "{url}/v1",
                    "apiKey": "none", "roles": ["chat"], "capabilities": ["tool_use"],
                    "defaultCompletionOptions": {"contextLength": 65536, "maxTokens": 400},
                }],
            })
        },
        is_npm=True,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """How a client fared; `note` says why it did not pass, or what it did not do."""

    client: Client
    state: str  # passed, FAILED or not run
    version: str = ""
    apis: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()  # that ran
    note: str = ""

    def row(self) -> str:
        """Return its row in a table of Markdown."""
        said = f"{self.state}: {self.note}" if self.note else self.state
        return f"| `{self.client.package}` | {self.version} | {', '.join(self.apis)} | {said} |"


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Packages; all by default.")] = None,
    environments: Annotated[Path | None, typer.Option(help="Keep the clients there, and use those that are.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Replace the table of this page.")] = None,
) -> int:
    """Let other people's clients use tools by a server of this command's own."""
    known = {client.package: client for client in CLIENTS}
    if unknown := set(names or ()) - known.keys():
        raise InputError("", f"expected names among {', '.join(known)}, found {min(unknown)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kept = environments.absolute() if environments else folder / "environments"
        random_model.main(folder / "model", hidden=64, layers=2, context=65536, dtype="float32", chats=True)
        results = []
        with brigade("--model", folder / "model", "--local", "0") as server, _proxy_to(server.url) as proxy:
            for name in dict.fromkeys(names or known):
                results.append(_checked(known[name], kept, folder / "runs" / name, proxy))
                print(results[-1].row(), *results[-1].tools, flush=True)
    if markdown:
        _write_table(markdown, results)
    return int(any(result.state == "FAILED" for result in results))


def _write_table(page: Path, results: list[Result]) -> None:
    """Replace the rows of these clients in the table of a page."""
    lines = page.read_text(encoding="utf-8").split("\n")
    for result in results:
        begins = f"| `{result.client.package}` |"
        number = next(number for number, line in enumerate(lines) if line.startswith(begins))
        lines[number] = result.row()
    page.write_text("\n".join(lines), encoding="utf-8")


# --- one client -------------------------------------------------------------------------------------------------------


def _checked(client: Client, environments: Path, folder: Path, proxy: "_Proxy") -> Result:
    """Install a client and run it in a folder of its own."""
    try:
        bin = installed(client.package, environments, is_npm=client.is_npm)
        node = [installed(_NODE, environments, is_npm=True)] if client.is_npm else []
        validator = installed(_VALIDATOR, environments, is_npm=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Result(client, "not run", note=f"cannot be installed ({type(error).__name__})")
    places = {"url": proxy.url, "bin": str(bin), "prompt": _PROMPT}
    proxy.seen = seen = Seen()
    home = folder / "home"
    home.mkdir(parents=True)
    for name, text in {"notes.txt": "The key is under the mat.\n", **client.files}.items():
        (folder / name).write_text(_filled(text, places), encoding="utf-8")
    path = os.pathsep.join([*map(str, node), str(bin), os.environ["PATH"]])
    environment = {"PATH": path, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
    environment |= {name: _filled(value, places) for name, value in client.environment.items()}
    version, ended = _version(client, environments), None
    for command in filter(None, (client.prepare, client.command)):
        try:
            ended = subprocess.run(
                [_filled(word, places) for word in command],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RUN_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result(client, "FAILED", version, note=f"took longer than {_RUN_S:g} s")
        finally:
            _end_left(home)
        if ended.returncode:
            break
    assert ended is not None
    note = _failure(client, seen, validator, ended)
    if note and seen.refusals:
        note += f", after {seen.refusals[0]}"
    note = " ".join(note.split()).replace("|", "/")
    tools = dict.fromkeys(seen.calls[id][0] for id in seen.results if id in seen.calls)
    state = "FAILED" if note else "passed"
    note = note or ("" if client.has_tools else "it sends no tools")
    return Result(client, state, version, tuple(seen.apis), tuple(tools), note)


def _end_left(home: Path) -> None:
    """End what a client left running, such as Cline's hub: the processes that have its home folder."""
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("HOME") == str(home):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _failure(client: Client, seen: "Seen", validator: Path, ended: "subprocess.CompletedProcess[str]") -> str:
    """Return why a client did not pass; empty if it did."""
    if ended.returncode:
        return f"ended with {ended.returncode}: {ended.stderr[-300:]}"
    if not client.has_tools:
        return "" if seen.apis else "asked nothing"
    if not (ran := [seen.calls[id] for id in seen.results if id in seen.calls]):
        return "ran no tool" if not seen.calls else "did not send back the result of a call"
    given = json.dumps([(seen.schemas[name], arguments) for name, arguments in ran])
    command = [str(validator / "python"), "-c", _VALIDATE]
    checked = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_RUN_S)
    return "called a tool with arguments that are not of its schema" if checked.returncode else ""


def _filled(text: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def installed(package: str, environments: Path, *, is_npm: bool) -> Path:
    """Return the folder of a package's commands, after it was installed if it was not."""
    folder = environments / package.replace("/", "+")
    bin = folder / ("node_modules/.bin" if is_npm else "bin")
    if (folder / "installed").exists():
        return bin
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if is_npm:
        (folder / "package.json").write_text("{}", encoding="utf-8")
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", package]
    else:
        venv.create(folder, with_pip=True)
        command = [str(bin / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_INSTALL_S)
    (folder / "installed").touch()
    return bin


def _version(client: Client, environments: Path) -> str:
    folder = environments / client.package.replace("/", "+")
    if client.is_npm:
        manifest = folder / "node_modules" / client.package / "package.json"
        return str(json.loads(manifest.read_text(encoding="utf-8"))["version"])
    ask = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    return subprocess.run([folder / "bin/python", "-c", ask], capture_output=True, text=True).stdout.strip()


# --- the proxy --------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What went through the proxy for one client."""

    apis: dict[str, None] = field(default_factory=dict)
    schemas: dict[str, Json] = field(default_factory=dict)  # of the parameters of each tool
    calls: dict[str, tuple[str, str]] = field(default_factory=dict)  # by id: name and arguments
    results: dict[str, None] = field(default_factory=dict)  # the ids of calls whose results came back
    refusals: list[str] = field(default_factory=list)

    def read_request(self, path: str, body: Json) -> None:
        """Note the tools and results of a request, and set its choice of tools."""
        self.apis[path] = None
        for tool in body.get("tools") or ():
            function = tool.get("function", tool)
            if schema := function.get("parameters") or function.get("input_schema"):
                self.schemas[function["name"]] = schema
        results = [found for found in map(_result_of, _parts(body)) if found]
        self.results |= dict.fromkeys(results)
        if body.get("tools"):
            choice = "none" if results else "required"
            kinds = {"none": "none", "required": "any"}
            body["tool_choice"] = {"type": kinds[choice]} if path == "/v1/messages" else choice

    def read_answer(self, status: int, text: str) -> None:
        """Note the calls of an answer, which may be a stream."""
        if status >= 400:
            self.refusals.append(f"{status}: {text[:300]}")
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        pieces: dict[Any, list[str]] = {}  # by the place of a call: its id, its name, its arguments
        for event in [json.loads(line) for line in lines] or [json.loads(text or "{}")]:
            for place, *piece in _pieces(event):
                known = pieces.setdefault(place, ["", "", ""])
                pieces[place] = [before + new for before, new in zip(known, piece, strict=True)]
        self.calls |= {id: (name, arguments) for id, name, arguments in pieces.values()}


def _parts(body: Json) -> Iterator[Json]:
    """Yield the messages and items of a conversation, and the blocks of messages."""
    items = body.get("messages") or body.get("input")
    for item in items if isinstance(items, list) else ():
        yield item
        yield from (part for part in item.get("content") or () if isinstance(part, dict))


def _result_of(part: Json) -> str | None:
    """Return the id of the call whose result this is."""
    is_result = part.get("role") == "tool" or part.get("type") in ("function_call_output", "tool_result")
    found = part.get("tool_call_id") or part.get("call_id") or part.get("tool_use_id")
    return str(found) if is_result and found else None


def _pieces(event: Json) -> Iterator[tuple[Any, str, str, str]]:
    """Yield the pieces of calls in an event or a whole answer: place, id, name, arguments."""
    for choice in event.get("choices") or ():
        for place, call in enumerate((choice.get("delta") or choice.get("message") or {}).get("tool_calls") or ()):
            function = call["function"]
            yield call.get("index", place), call.get("id", ""), function.get("name", ""), function["arguments"]
    match event:
        case {"type": "response.output_item.done", "item": {"type": "function_call"} as item}:
            yield item["call_id"], item["call_id"], item["name"], item["arguments"]
        case {"output": [*items]}:
            for item in items:
                if item["type"] == "function_call":
                    yield item["call_id"], item["call_id"], item["name"], item["arguments"]
        case {"type": "content_block_start", "content_block": {"type": "tool_use"} as block}:
            yield event["index"], block["id"], block["name"], ""
        case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": str(text)}}:
            yield event["index"], "", "", text
        case {"type": "message", "content": [*blocks]}:
            for place, block in enumerate(blocks):
                if block["type"] == "tool_use":
                    yield place, block["id"], block["name"], json.dumps(block["input"])


class _Proxy(ThreadingHTTPServer):
    """Passes requests to the server at `url`; `seen` is what it notes."""

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target = urlsplit(url).netloc
        self.seen = Seen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Passing(BaseHTTPRequestHandler):
    server: _Proxy

    def do_POST(self) -> None:
        seen, path = self.server.seen, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        if is_asked := path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            asked = json.loads(body)
            seen.read_request(path, asked)
            body = json.dumps(asked).encode()
        answer = self._pass(body)
        if is_asked:
            seen.read_answer(*answer)

    def do_GET(self) -> None:
        self._pass(None)

    do_HEAD = do_GET

    def _pass(self, body: bytes | None) -> tuple[int, str]:
        kept = {name: value for name, value in self.headers.items() if name.lower() in ("content-type", "accept")}
        connection = HTTPConnection(self.server.target)
        with contextlib.closing(connection), contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(self.command, self.path, body, kept)
            answer = connection.getresponse()
            self.send_response(answer.status)
            self.send_header("content-type", answer.getheader("content-type", "application/json"))
            self.send_header("connection", "close")
            self.end_headers()
            text = b""
            while piece := answer.read1():
                text += piece
                self.wfile.write(piece)
            return answer.status, text.decode()
        return 0, ""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def _proxy_to(url: str) -> Iterator[_Proxy]:
    with _Proxy(url) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, name="proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


if __name__ == "__main__":
    run_command(main)
