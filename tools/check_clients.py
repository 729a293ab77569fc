"""Clients that no one here wrote, against a server: `llm` (the command) and `litellm` (the library).

Neither is a dependency of this project: `pip install llm litellm`, here or beside it.

python -m tools.check_clients [--python ENVIRONMENT/bin/python]

Each of them chats, streams, asks for an answer of a schema, offers tools, and uses the other shapes that it knows;
whatever it gets has to be what a plain request got. Exits with 1 where it is not, or where a client is missing.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer

from tools.serve_client import brigade
from worker.platform.run import run_command

_NAME, _PROMPT, _MOST = "served", "Tell me a story about a fox.", 24
_LITELLM = Path(__file__).with_name("litellm_requests.py")
_TOOL = 'def add(a: int, b: int) -> int:\n    "Add two numbers."\n    return a + b\n'
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "is_new": {"type": "boolean"}},
    "required": ["name", "is_new"],
    "additionalProperties": False,
}
_KINDS: dict[str, dict[str, Any]] = {"chat": {}, "responses": {"responses": True}}  # of models, as `llm` knows them
_LONGEST_S = 120.0


@dataclass(frozen=True)
class Check:
    """One use of a client, and what it says then; None: whatever the model makes of it."""

    name: str
    command: list[str]
    expected: str | None = None
    is_json: bool = False

    def is_right(self, said: str) -> bool:
        return _is_of_schema(said) if self.is_json else self.expected in (None, said)


def main(
    python: Annotated[Path, typer.Option(help="Of the environment that the clients are in.")] = Path(sys.executable),
    model: Annotated[str, typer.Option(help="As for `brigade serve`.")] = "demo",
    local: Annotated[int, typer.Option(min=0, help="Workers.")] = 1,
) -> None:
    """Let other people's clients use a server of this command's own."""
    missing = [name for name in ("llm", "litellm") if not _has(python, name)]
    for name in missing:
        print(f"FAILED: {name} is not installed there: {python} -m pip install {name}")
    flags = ("--model", model, "--local", str(local), "--served-model-name", _NAME, "--temp", "0")
    with brigade(*flags) as server, tempfile.TemporaryDirectory() as folder:
        expected = _plain(server.url)
        skipped = set() if _calls_tools(server.url) else {"litellm calls"}
        checks = [*_llm(python, Path(folder), server.url, expected), *_litellm(python, server.url, expected)]
        checks = [each for each in checks if each.name.split()[0] not in missing and each.name not in skipped]
        failed = [check for check in checks if not _holds(check, folder)]
    for name in skipped:
        print(f"skipped: {name}: {model} has no format for calls; try another --model")
    raise typer.Exit(1 if failed or missing else 0)


def _is_of_schema(said: str) -> bool:
    try:
        return bool(json.loads(said).keys() == _SCHEMA["properties"].keys())
    except (ValueError, AttributeError):
        return False


def _has(python: Path, module: str) -> bool:
    return not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode


def _calls_tools(url: str) -> bool:
    tool = {"type": "function", "function": {"name": "now"}}
    body = {"messages": [{"role": "user", "content": _PROMPT}], "tools": [tool], "tool_choice": "required"}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=_LONGEST_S).status_code == 200


def _plain(url: str) -> str:
    """What the model says, without anybody's client."""
    body = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": _MOST}
    answer: dict[str, Any] = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=_LONGEST_S).json()
    return str(answer["choices"][0]["message"]["content"]).strip()


def _llm(python: Path, folder: Path, url: str, expected: str) -> Iterator[Check]:
    """Its models are named in a file of its own folder."""
    told = {"model_name": _NAME, "api_base": f"{url}/v1", "supports_schema": True, "supports_tools": True}
    models = [{"model_id": kind, **told, **more} for kind, more in _KINDS.items()]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")  # which is YAML too
    for kind in _KINDS:
        ask = [str(python), "-m", "llm", "prompt", _PROMPT, "-m", kind, "--no-log", "-o", "max_tokens"]
        yield Check(f"llm {kind}, streamed", [*ask, str(_MOST)], expected)
        yield Check(f"llm {kind}, at once", [*ask, str(_MOST), "--no-stream"], expected)
        yield Check(f"llm {kind}, tools", [*ask, str(_MOST), "--functions", _TOOL])
        yield Check(f"llm {kind}, schema", [*ask, "100", "--schema", json.dumps(_SCHEMA)], is_json=True)


def _litellm(python: Path, url: str, expected: str) -> Iterator[Check]:
    names = subprocess.run([python, _LITELLM, "--names"], capture_output=True, text=True).stdout.split()
    for name in names:
        yield Check(f"litellm {name}", [str(python), str(_LITELLM), name, url, _NAME, _PROMPT, str(_MOST)], expected)


def _holds(check: Check, folder: str) -> bool:
    environment = os.environ | {
        "LLM_USER_PATH": folder,
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    found = subprocess.run(check.command, env=environment, capture_output=True, text=True, timeout=_LONGEST_S)
    said = found.stdout.strip()
    is_right = not found.returncode and check.is_right(said)
    print(f"{'ok' if is_right else 'FAILED'}: {check.name}", flush=True)
    if not is_right:
        print(f"  expected {check.expected!r}, found {said!r}\n  {found.stderr[-1000:]}")
    return is_right


if __name__ == "__main__":
    run_command(main)
