"""docs/json.md has a section for each command with --json; docs/troubleshooting.md has messages of the code."""

import json
import re
from pathlib import Path
from typing import Any

import typer

from coordinator.cli.app import app

ROOT = Path(__file__).resolve().parents[2]


def has_json(command: Any) -> bool:
    inner = getattr(command, "commands", {}).values()
    return any("--json" in flag.opts for flag in command.params) or any(map(has_json, inner))


def test_every_command_with_json_has_its_section_with_json_in_it() -> None:
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    documented = {name for line in re.findall(r"^## `brigade (.*)`$", page, re.MULTILINE)
                  for name in line.split()[:1] if "--json" in line}  # fmt: skip
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {name for name, each in commands.items() if has_json(each)} == documented | {"demo"}
    blocks = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(blocks) > 10 and all(isinstance(json.loads(block), dict) for block in blocks)


def test_messages_of_the_page_of_troubleshooting_are_those_of_the_code() -> None:
    files = [path for room in ("coordinator", "worker") for path in (ROOT / room).rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (`.*)$", page, re.MULTILINE)
    said = [part.strip() for message in re.findall(r"`([^`]+)`", " ".join(headings)) for part in message.split("…")]
    assert len(headings) > 20 and not [part for part in said if part not in code]
