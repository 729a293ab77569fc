"""The pages of docs/ and the code agree, both ways: keys of cluster.yaml, routes and fields of the server, JSON."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from coordinator.api.anthropic import CountBody, MessagesBody
from coordinator.api.app import OPERATIONS
from coordinator.api.body import UNSUPPORTED, Sampled
from coordinator.api.completions import CompletionBody
from coordinator.api.openai import ChatBody
from coordinator.api.responses import _REFUSED, ResponsesBody
from coordinator.api.scoring import ClassifyBody, ScoreBody
from coordinator.api.tokenizing import DetokenizeBody, TokenizeBody
from worker.config import ClusterConfig, load_cluster
from worker.errors import ConfigError

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLUSTER, HTTP = ((DOCS / name).read_text(encoding="utf-8") for name in ("cluster_yaml.md", "http.md"))
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


def sections(page: str) -> dict[str, str]:
    """The text below each heading that is code, by that code."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)[1:]
    return {head[1:-1]: text for head, text in zip(parts[::2], parts[1::2], strict=True) if head.startswith("`")}


def names_after(word: str, text: str) -> set[str]:
    """What the paragraph that begins with this word lists."""
    found = re.search(rf"^{word}: (.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`]+)`", found[1])) if found else set()


def keys_of(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key of cluster.yaml that holds no keys of its own."""
    for name, field in section.model_fields.items():
        path = before + (field.alias or name)
        inner = [kind for kind in kinds_in(field.annotation) if issubclass(kind, BaseModel)]
        if inner:
            yield from keys_of(inner[0], f"{path}{'[]' if path == 'workers' else ''}.")
        else:
            yield path


def kinds_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for each in get_args(annotation):
        yield from kinds_in(each)


def test_every_key_of_cluster_yaml_has_its_section_and_no_other_has() -> None:
    assert list(sections(CLUSTER)) != [] and set(sections(CLUSTER)) == set(keys_of(ClusterConfig))


def snippets(word: str) -> list[Any]:
    found = [
        pytest.param(text, id=f"{key}: {text}")
        for key, section in sections(CLUSTER).items()
        for text in re.findall(rf"^\* {word}: `(.*)`$", section, re.MULTILINE)
    ]
    assert len(found) >= len(sections(CLUSTER)), f"a key without {word}"
    return found


@pytest.mark.parametrize("text", [*snippets("Example"), *re.findall(r"```yaml\n(.*?)```", CLUSTER, re.DOTALL)])
def test_what_the_page_gives_as_an_example_is_taken(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_cluster(path) != ClusterConfig()


@pytest.mark.parametrize("text", snippets("Refused"))
def test_what_the_page_says_is_refused_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has 1 problem\(s\)"):
        load_cluster(path)


def test_every_route_has_its_section_and_no_other_has() -> None:
    assert sorted(sections(HTTP)) == sorted(f"{each.method} {each.path}" for each in OPERATIONS)


@pytest.mark.parametrize("route", BODIES)
def test_the_page_lists_the_fields_of_each_body_and_what_it_refuses(route: str) -> None:
    body, text = BODIES[route], sections(HTTP)[route]
    common = set(Sampled.model_fields) if issubclass(body, Sampled) else set()
    own_refusals = set(_REFUSED) if body is ResponsesBody else set()
    named = {field.alias or name for name, field in body.model_fields.items()} - common - own_refusals
    assert names_after("Fields", text) == named
    refused = set(getattr(body, "unsupported", {})) - (set(UNSUPPORTED) if common else set())
    assert names_after("Refused", text) - named == (refused | own_refusals) - named


def test_the_page_lists_the_fields_that_all_bodies_share() -> None:
    [shared] = re.findall(r"^## Fields that all four APIs take$(.*?)^## ", HTTP, re.MULTILINE | re.DOTALL)
    assert names_after("Fields", shared) == set(Sampled.model_fields)
    assert names_after("Refused", shared) == set(UNSUPPORTED)


@pytest.mark.parametrize("page", sorted([*DOCS.parent.glob("*.md"), *DOCS.glob("*.md")]), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        found = (page.parent / path) if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def anchors(page: Path) -> Sequence[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_page_and_picture_is_reached_from_the_readme() -> None:
    pages = [DOCS.parent / "README.md"]
    for page in pages:  # which grows
        if page.suffix != ".md":
            continue
        links = re.findall(r"(?:\]\(|src(?:set)?=\")([^)#\"\s]+)", page.read_text(encoding="utf-8"))
        here = [(page.parent / link).resolve() for link in links if not link.startswith("http")]
        pages += [found for found in here if found.suffix in {".md", ".svg", ".png"} and found not in pages]
    assert not {path for path in DOCS.iterdir() if path.suffix != ".json"} - set(pages)


def test_json_of_the_page_is_json() -> None:
    blocks = re.findall(r"```json\n(.*?)```", (DOCS / "json.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 10 and all(isinstance(json.loads(block), dict) for block in blocks)


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    root = DOCS.parent
    code = "".join(
        path.read_text(encoding="utf-8") for room in ("coordinator", "worker") for path in (root / room).rglob("*.py")
    )
    headings = re.findall(r"^### (`.*)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    said = [part.strip() for message in re.findall(r"`([^`]+)`", " ".join(headings)) for part in message.split("…")]
    assert len(headings) > 20 and not [part for part in said if part not in code]
