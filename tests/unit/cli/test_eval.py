"""`brigade eval` and questions that the model cannot answer: refused by their lines."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.eval import EvalCase, EvalModel, EvalRun, loaded
from coordinator.cluster.options import cluster_options
from coordinator.engine import engine
from coordinator.engine.bounded import Texts
from coordinator.quality.questions import Question
from coordinator.sessions.output import Output
from coordinator.sessions.request import RequestSpec
from tests.cluster.models import make_talker
from worker.errors import InputError


def case(prompt: str, *continuations: str) -> EvalCase:
    question = Question("q.jsonl, line 7", prompt, ("0",), "exact", continuations=continuations)
    return EvalCase("q", question, "ar", RequestSpec((), 9), None, raw=False)


@pytest.mark.parametrize(
    "asked", [case("Hi" * 9999), case("Hi", " a", " b" * 9999), case("Hi", " a", ""), case("Hi", " a", "\ud800")]
)
def test_what_the_model_cannot_serve_is_named_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, asked: EvalCase
) -> None:
    def open_engine(*given: Any, **more: Any) -> None:
        pytest.fail("it would be loaded")

    monkeypatch.setattr(engine, "open_engine", open_engine)

    async def load() -> None:
        async with loaded(cluster_options(None, "demo", 0), [case("Hi", " a", " b"), case("Hi"), asked], 1):
            pass

    with pytest.raises(InputError, match=r"^questions: q\.jsonl, line 7: "):
        asyncio.run(load())


def test_answers_of_another_drafter_are_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @asynccontextmanager
    async def open_engine(*given: Any, **more: Any) -> AsyncGenerator[None, None]:
        yield

    async def key(drafter: str) -> str:
        async with loaded(cluster_options(None, folders[0], 0, draft_model=drafter), [case("Hi")], 1) as model:
            return case("Hi").key(model)

    monkeypatch.setattr(engine, "open_engine", open_engine)
    folders = [str(make_talker(tmp_path / name)) for name in ("big", "small")]
    assert len({asyncio.run(key(drafter)) for drafter in ("none", *folders, *folders)}) == 3


@pytest.mark.parametrize(
    ("field", "named"), [("messages", "questions"), ("continuations.1", "questions"), ("top_k", "top_k")]
)
def test_what_a_server_refuses_is_named(field: str, named: str) -> None:
    async def refuse(asked: EvalCase) -> AsyncGenerator[Output, None]:
        raise InputError(field, "too long")
        yield

    async def answer() -> None:
        await EvalRun([case("Hi")], Texts()).answer_all(EvalModel("m", refuse), {}, None, 1)

    with pytest.raises(InputError) as refusal:
        asyncio.run(answer())
    assert str(refusal.value) == f"{named}: q.jsonl, line 7: too long"
