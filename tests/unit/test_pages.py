"""README and pages name commands, flags, files, links, keys, routes, fields and messages of the code, and no others."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from coordinator.api.anthropic import CountBody, MessagesBody
from coordinator.api.app import OPERATIONS
from coordinator.api.body import UNSUPPORTED, Sampled
from coordinator.api.completions import CompletionBody
from coordinator.api.conversations import Conversing
from coordinator.api.openai import ChatBody
from coordinator.api.responses import ResponsesBody
from coordinator.api.texts import ClassifyBody, DetokenizeBody, ScoreBody, TokenizeBody
from coordinator.cli.app import app
from worker.config import ClusterConfig, load_cluster
from worker.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
}
TEXT = "\n".join(PAGES.values())
TOP: Any = typer.main.get_command(app)
BODIES: dict[str, type[BaseModel]] = {
    "POST /v1/chat/completions": ChatBody,
    "POST /v1/completions": CompletionBody,
    "POST /v1/responses": ResponsesBody,
    "POST /v1/messages": MessagesBody,
    "POST /v1/messages/count_tokens": CountBody,
    "POST /v1/score": ScoreBody,
    "POST /v1/classify": ClassifyBody,
    "POST /tokenize": TokenizeBody,
    "POST /detokenize": DetokenizeBody,
}


def commands_in(text: str) -> set[str]:
    text = re.sub(r" *\\\n *", " ", text)  # a command on several lines
    in_blocks = re.findall(r"^ *(?:\w+=\S+ )*(brigade [a-z][^#\n]*?)(?:&|\d?>|#|$)", text, re.MULTILINE)
    in_text = re.findall(r"`(brigade [a-z][^`\n]*)`", text)
    return {command.strip() for command in (*in_text, *in_blocks)}


def test_commands_of_the_pages_exist_with_their_flags_and_every_command_is_shown() -> None:
    for command in commands_in(TEXT):
        found: Any = TOP
        arguments = shlex.split(command)[1:]
        while hasattr(found, "commands") and arguments:
            assert arguments[0] in found.commands, command
            found = found.commands[arguments.pop(0)]
        known = {flag for parameter in found.params for flag in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("-")} <= known, command
    assert {shlex.split(command)[1] for command in commands_in(PAGES["docs/commands.md"])} == set(TOP.commands)


def test_files_modules_and_make_targets_of_the_pages_exist() -> None:
    for path in set(re.findall(r"`((?:coordinator|worker|tools|tests)/[\w/.]+)`", TEXT)):
        assert (ROOT / path).exists(), path
    for module in set(re.findall(r"python -m ((?:coordinator|worker|tools)[\w.]*)\b", TEXT)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z]+)", TEXT)) <= set(targets)


def test_links_between_pages_lead_somewhere() -> None:
    def anchors(page: Path) -> list[str]:
        """The anchors that GitHub makes of headings."""
        headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]

    for name, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            found = ((ROOT / name).parent / path).resolve() if path else ROOT / name
            assert path.startswith("http") or found.exists(), (name, target)
            assert not anchor or path.startswith("http") or anchor in anchors(found), (name, target)


def test_the_readmes_cluster_file_and_the_example_load(tmp_path: Path) -> None:
    [example] = [each for each in re.findall(r"```yaml\n(.*?)```", PAGES["README.md"], re.DOTALL) if "workers:" in each]
    path = tmp_path / "cluster.yaml"
    path.write_text(textwrap.dedent(example), encoding="utf-8")
    assert [worker.name for worker in load_cluster(path).workers] == ["mini"]
    assert load_cluster(ROOT / "cluster.example.yaml").workers


def test_every_command_with_json_has_a_section_and_every_block_is_json() -> None:
    def has_json(command: Any) -> bool:
        inner = getattr(command, "commands", {}).values()
        return any("--json" in flag.opts for flag in command.params) or any(map(has_json, inner))

    headings = re.findall(r"^## `brigade (.*)`$", PAGES["docs/json.md"], re.MULTILINE)
    documented = {line.split()[0] for line in headings if "--json" in line}
    assert {name for name, each in TOP.commands.items() if has_json(each)} == documented | {"demo"}
    blocks = re.findall(r"```json\n(.*?)```", PAGES["docs/json.md"], re.DOTALL)
    assert len(blocks) > 10 and all(isinstance(json.loads(block), dict) for block in blocks)


def test_messages_of_the_page_of_troubleshooting_are_those_of_the_code() -> None:
    files = [path for room in ("coordinator", "worker") for path in (ROOT / room).rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    headings = re.findall(r"^### (`.*)$", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    said = [part.strip() for message in re.findall(r"`([^`]+)`", " ".join(headings)) for part in message.split("…")]
    assert len(headings) > 20 and not [part for part in said if part not in code]


def sections(page: str) -> dict[str, str]:
    """The text below each heading that is code, by that code."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)[1:]
    return {head[1:-1]: text for head, text in zip(parts[::2], parts[1::2], strict=True) if head.startswith("`")}


def keys_of(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key of cluster.yaml that holds no keys of its own."""

    def sections_in(annotation: Any) -> list[Any]:
        inner = [each for argument in get_args(annotation) for each in sections_in(argument)]
        return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else inner

    for name, field in section.model_fields.items():
        path = before + (field.alias or name)
        if inner := sections_in(field.annotation):
            yield from keys_of(inner[0], f"{path}{'[]' if path == 'workers' else ''}.")
        else:
            yield path


def test_every_key_of_cluster_yaml_has_its_section_and_examples_are_taken_or_refused_as_said(tmp_path: Path) -> None:
    page, path = PAGES["docs/cluster_yaml.md"], tmp_path / "cluster.yaml"
    assert set(sections(page)) == set(keys_of(ClusterConfig))
    for text in re.findall(r"^\* Example: `(.*)`$", page, re.MULTILINE):
        path.write_text(text, encoding="utf-8")
        assert load_cluster(path) != ClusterConfig(), text
    refused = re.findall(r"^\* Refused: `(.*?)`", page, re.MULTILINE)
    assert len(refused) > 4
    for text in refused:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"has 1 problem:"):
            load_cluster(path)


def test_every_route_has_its_section_and_every_body_its_fields() -> None:
    def names_after(word: str, text: str) -> set[str]:
        """What the paragraph that begins with this word lists."""
        found = re.search(rf"^{word}: (.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
        return set(re.findall(r"`([^`]+)`", found[1])) if found else set()

    routes = sections(PAGES["docs/http.md"])
    assert sorted(routes) == sorted(f"{each.method} {each.path}" for each in OPERATIONS)
    for route, body in BODIES.items():
        shared = next((each for each in (Conversing, Sampled) if issubclass(body, each)), None)
        common = set(shared.model_fields) if shared else set()
        named = {field.alias or name for name, field in body.model_fields.items()} - common
        assert names_after("Fields", routes[route]) == named, route
        refused = set(getattr(body, "unsupported", {})) - (set(UNSUPPORTED) if common else set())
        assert names_after("Refused", routes[route]) - named == refused - named, route
    common, conversing = (
        next(re.finditer(rf"^## {heading}$(.*?)^## ", PAGES["docs/http.md"], re.MULTILINE | re.DOTALL))[1]
        for heading in ("Fields that all four APIs take", "Conversations")
    )
    assert names_after("Fields", common) == set(Sampled.model_fields)
    assert names_after("Refused", common) == set(UNSUPPORTED)
    assert names_after("Fields", conversing) == Conversing.model_fields.keys() - Sampled.model_fields.keys()
