"""docs/cluster_yaml.md and docs/http.md have the keys, routes and fields of the code, and no others."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from coordinator.api.anthropic import CountBody, MessagesBody
from coordinator.api.app import OPERATIONS
from coordinator.api.body import UNSUPPORTED, Sampled
from coordinator.api.completions import CompletionBody
from coordinator.api.conversations import Conversing
from coordinator.api.openai import ChatBody
from coordinator.api.responses import _REFUSED, ResponsesBody
from coordinator.api.texts import ClassifyBody, DetokenizeBody, ScoreBody, TokenizeBody
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


def kinds_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for each in get_args(annotation):
        yield from kinds_in(each)


def keys_of(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key of cluster.yaml that holds no keys of its own."""
    for name, field in section.model_fields.items():
        path = before + (field.alias or name)
        inner = [kind for kind in kinds_in(field.annotation) if issubclass(kind, BaseModel)]
        if inner:
            yield from keys_of(inner[0], f"{path}{'[]' if path == 'workers' else ''}.")
        else:
            yield path


def test_every_key_of_cluster_yaml_has_its_section_and_examples_are_taken_or_refused_as_said(tmp_path: Path) -> None:
    assert set(sections(CLUSTER)) == set(keys_of(ClusterConfig))
    path = tmp_path / "cluster.yaml"
    for text in re.findall(r"^\* Example: `(.*)`$", CLUSTER, re.MULTILINE):
        path.write_text(text, encoding="utf-8")
        assert load_cluster(path) != ClusterConfig(), text
    refused = re.findall(r"^\* Refused: `(.*?)`", CLUSTER, re.MULTILINE)
    assert len(refused) > 4
    for text in refused:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"has 1 problem\(s\)"):
            load_cluster(path)


def test_every_route_has_its_section_and_every_body_its_fields() -> None:
    pages = sections(HTTP)
    assert sorted(pages) == sorted(f"{each.method} {each.path}" for each in OPERATIONS)
    for route, body in BODIES.items():
        shared = next((each for each in (Conversing, Sampled) if issubclass(body, each)), None)
        common = set(shared.model_fields) if shared else set()
        own_refusals = set(_REFUSED) if body is ResponsesBody else set()
        named = {field.alias or name for name, field in body.model_fields.items()} - common - own_refusals
        assert names_after("Fields", pages[route]) == named, route
        refused = set(getattr(body, "unsupported", {})) - (set(UNSUPPORTED) if common else set())
        assert names_after("Refused", pages[route]) - named == (refused | own_refusals) - named, route
    [text] = re.findall(r"^## Fields that all four APIs take$(.*?)^## ", HTTP, re.MULTILINE | re.DOTALL)
    assert names_after("Fields", text) == set(Sampled.model_fields)
    assert names_after("Refused", text) == set(UNSUPPORTED)
    [text] = re.findall(r"^## Conversations$(.*?)^## ", HTTP, re.MULTILINE | re.DOTALL)
    assert names_after("Fields", text) == Conversing.model_fields.keys() - Sampled.model_fields.keys()
