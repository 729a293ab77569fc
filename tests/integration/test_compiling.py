"""Grammars are compiled beside the steps of sessions that have none."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from coordinator.engine.engine import Engine, collect
from coordinator.engine.grammars import regex_grammar
from coordinator.sessions.request import RequestSpec
from protos.brigade_pb2 import Grammar
from tests.cluster.models import make_talker
from tests.integration.conftest import load, load_request, peer_of, serving
from tests.integration.test_scores import resident
from worker.compute import grammar as grammars
from worker.errors import FrameError, ModelError, SamplingError

NUMBER = RequestSpec("Count: ", max_tokens=9, grammar=regex_grammar("[0-9]{3,5}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("compiling") / "model")


async def said(model: Engine, ask: RequestSpec) -> str:
    [deltas] = await collect(model, [await model.prepare(ask)])
    return "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("layers", [(4,), (1, 3)], ids=str)
async def test_a_long_compilation_holds_up_no_session(
    folder: Path, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled on the last stage before another session has had its whole answer."""
    compiles, may_go_on = asyncio.Event(), threading.Event()
    loop, compiled = asyncio.get_running_loop(), grammars.Grammars._compile
    async with resident(folder, layers) as model:

        def slowly(self: grammars.Grammars, grammar: Grammar) -> LLMatcher:
            loop.call_soon_threadsafe(compiles.set)
            assert may_go_on.wait(20)
            return compiled(self, grammar)

        monkeypatch.setattr(grammars.Grammars, "_compile", slowly)
        number = asyncio.create_task(said(model, NUMBER))
        try:
            await compiles.wait()
            assert len(await said(model, RequestSpec("Once", max_tokens=12, ignore_eos=True))) > 0
            assert not number.done()
        finally:
            may_go_on.set()
        assert (await number).isdigit()


async def test_the_vocabulary_is_read_before_the_first_grammar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that takes longer than a client's grammar may."""
    read, tokenizer = list[Any](), grammars.LLTokenizer
    monkeypatch.setattr(grammars, "LLTokenizer", lambda *given, **more: read.append(more) or tokenizer(*given, **more))
    grammars._read_tokenizer.cache_clear()
    async with resident(folder, (1, 3)) as model:
        await model.expect_grammars()
        assert len(read) == 1  # on the last stage, which is in this process; grammars are tried in another one
        assert (await said(model, NUMBER)).isdigit()
        assert len(read) == 1


async def test_a_worker_refuses_grammars_that_it_cannot_compile(folder: Path) -> None:
    async with serving(1) as [node], peer_of(node) as peer:
        with pytest.raises(ModelError, match="holds no shard"):
            await peer.compile(Grammar(text=regex_grammar("a"), eos=[1]))
        await load(node, load_request(folder, 1, 4))
        with pytest.raises(SamplingError, match="its parser says"):
            await peer.compile(Grammar(text=regex_grammar("(a"), eos=[1]))
        with pytest.raises(FrameError, match="tokens that end an answer"):
            await peer.compile(Grammar(text=regex_grammar("a"), eos=[1] * 65))
