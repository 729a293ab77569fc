"""Requests as streams: they come, leave and fail without touching each other; a lost chain or engine ends them all."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine
from coordinator.planning.costs import ChainCosts
from coordinator.sessions.output import Answer
from coordinator.sessions.text import TextParser
from protos.brigade_pb2 import Frame
from tests.integration.conftest import CHUNK, Models, Whole, opened, running, serving
from tests.integration.many import Frames, Live, request, running_within, solo, tokens_of, until, wait_freed, wait_slots
from tests.integration.many import frames as frames
from tests.integration.windows import MASKED, Words
from worker.compute.shard import Shard
from worker.errors import ModelError, NodeBusy, StageLost

pytestmark = pytest.mark.usefixtures("in_turns")

LAYERS = (1, 3)
ASKED = request(tokens_of(20), 12, seed=3, temperature=0.9, logprobs=3)
FOREVER = 450  # tokens: more than any test waits for
STREAMS = [request(tokens_of(4 + 9 * i, i), 16, seed=i, temperature=i % 2) for i in range(3)]


# --- one stream ---------------------------------------------------------------------------------------------------


async def test_pieces_folded_are_the_answer(folder: Path) -> None:
    async with running(folder, LAYERS) as chain:
        [expected] = await solo(chain, [ASKED])
        async with Engine(chain) as engine:
            found = Answer()
            async for piece in engine.generate(ASKED, chunk=CHUNK):
                assert (piece.finish_reason is None) == (piece.usage is None)
                found.add(piece)
            traced = await engine.answer(replace(ASKED, prompt=tokens_of(20, 1)), chunk=CHUNK, traced=True)
    assert len(traced.passages) == 2 + 12  # 20 tokens of prompt in chunks of 8, the last with the first token
    assert found.samples == expected.samples and len(found.samples) == 12
    assert all(len(token.alternatives) == 2 and token.logprob < 0 for token in found.samples)
    assert (found.text, found.finish_reason) == (",".join(map(str, found.tokens)), "length")
    assert found.usage.num_prompt == 20 and found.usage.num_steps == 12
    assert found.passages == [] and found.token_times == sorted(found.token_times)


async def test_chunks_follow_what_links_carry(folder: Path, frames: Frames) -> None:
    async with running(folder, LAYERS) as chain, Engine(chain) as engine:
        first, chain.costs = len(frames), ChainCosts(len(LAYERS))
        for rows in (1, 64, 1, 64):
            chain.costs.observe(rows, [0.01] * len(LAYERS), 0.02 + 0.01 * rows, was_alone=True)
        await engine.answer(request(tokens_of(100, 3), 1))
    assert max(len(window.tokens) for frame in list(frames)[first:] for window in frame.windows) == 32


@pytest.mark.parametrize("decode", [Decode(), Decode("diffusion", 8)], ids=lambda decode: decode.kind)
async def test_a_stop_string_ends_the_stream_and_frees_or_keeps_the_slot(models: Models, decode: Decode) -> None:
    asked = request(tokens_of(20), 30, decode)
    async with running(models("qwen3", **MASKED).folder, LAYERS) as chain:
        [whole] = await solo(chain, [asked])
        stop = f" {whole.tokens[14]} {whole.tokens[15]}"
        async with Engine(chain) as engine:
            found = await engine.answer(asked, parser=TextParser(Words(), [stop]), chunk=CHUNK)
            await wait_slots(chain, 1)  # kept for its prefix
            assert found.finish_reason == "stop" and found.tokens == whole.tokens[: len(found.tokens)]
            assert found.usage.num_steps <= len(found.tokens), "not the step that was under way when it was found"
            assert found.text == "".join(f" {token}" for token in whole.tokens).split(stop)[0]
            again = await engine.answer(asked, chunk=CHUNK)
            assert again.tokens == whole.tokens and again.usage.num_reused == 19
        await wait_freed(chain)


async def test_a_slow_reader_pauses_its_own_session_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("core", "engine"):
        monkeypatch.setattr(f"coordinator.engine.{module}.MOST_UNREAD", 6)
    slow = request(tokens_of(9, 1), 20)
    async with running(folder, LAYERS) as chain:
        [expected] = await solo(chain, [slow])
        async with Engine(chain) as engine, aclosing(engine.generate(slow, chunk=CHUNK)) as pieces:
            found = Answer()
            found.add(await anext(pieces))
            other = Live(engine, request(tokens_of(9, 2), 20))
            assert len((await other.answer()).tokens) == 20
            [session] = engine.sessions
            assert session.is_paused and session.num_generated == 1 + 6, "one read, six unread, and not one more"
            async for piece in pieces:
                found.add(piece)
    assert found.tokens == expected.tokens


class Broken:
    """A detokenizer that fails at its fifth token, or at the end, where it is called."""

    def __init__(self, place: str, error: Exception) -> None:
        self._place, self._error = place, error
        self._num_tokens = 0

    def add_token(self, token: int) -> None:
        self._num_tokens += 1
        self._fail("add_token", self._num_tokens == 5)

    @property
    def last_segment(self) -> str:
        self._fail("last_segment", self._num_tokens == 5)
        return "x"

    def finalize(self) -> None:
        self._fail("finalize", True)

    def _fail(self, place: str, now: bool) -> None:
        if place == self._place and now:
            raise self._error


async def test_a_tokenizer_that_breaks_anywhere_fails_its_own_request_only(folder: Path) -> None:
    bug, hole = RuntimeError("broke"), TypeError("sequence item 0: expected str instance, NoneType found")
    async with running(folder, LAYERS) as chain:
        async with Engine(chain) as engine:
            other = Live(engine, request(tokens_of(3, 1), 60))
            for place, error, raised, said in (
                ("add_token", bug, RuntimeError, "broke"),
                ("last_segment", bug, RuntimeError, "broke"),
                ("finalize", bug, RuntimeError, "broke"),
                ("add_token", hole, ModelError, r"no text for token \d+ \(TypeError"),
            ):
                text: Any = TextParser(Broken(place, error), ())
                with pytest.raises(raised, match=said):
                    await engine.answer(request(tokens_of(3), 12), parser=text)
            assert len((await other.answer()).tokens) == 60
        await wait_freed(chain)


# --- who leaves -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def streaming(whole: Whole, layers: Sequence[int]) -> AsyncIterator[tuple[Engine, list[Live]]]:
    """STREAMS under way; in the end each is what it is alone, and no other request goes on."""
    async with running(whole.folder, layers) as chain:
        async with Engine(chain) as engine:
            live = [Live(engine, each) for each in STREAMS]
            yield engine, live
            found = [await each.answer() for each in live]
            await until(lambda: not engine.sessions)
        await wait_freed(chain)
    assert [each.tokens for each in found] == whole.tokens_of(STREAMS)


@pytest.mark.parametrize("layers", [(4,), (1, 2, 1)], ids=str)
async def test_cancelling_while_decoding_ends_its_steps_and_changes_no_tokens(
    models: Models, frames: list[Frame], layers: tuple[int, ...]
) -> None:
    async with streaming(models("qwen3"), layers) as (engine, live):
        leaving = Live(engine, request(tokens_of(7, 9), FOREVER))
        for each in (leaving, live[-1]):
            await each.wait_pieces(3)
        sent = len(frames)
        leaving.task.cancel()
    assert 3 not in [window.slot for frame in frames[sent + 1 + len(layers) :] for window in frame.windows]


async def test_cancelling_while_a_prompt_is_fed_changes_no_tokens(models: Models, frames: Frames) -> None:
    async with streaming(models("gemma3_text"), (1, 2, 1)) as (engine, live):
        await live[0].wait_pieces(2)
        frames.clear()
        leaving = Live(engine, request(tokens_of(400, 9), 5))
        await frames.wait_window(lambda window: len(window.tokens) == CHUNK, count=5)
        leaving.task.cancel()
    assert leaving.num_pieces == 0
    assert sum(len(w.tokens) for frame in frames for w in frame.windows if w.slot == 3) < 400


async def test_many_cancels_at_once_leave_the_others(models: Models) -> None:
    """While waiting, while prompts are fed and while decoding."""
    decodes = [Decode(), Decode("diffusion", 8), Decode("ngram")]
    async with streaming(models("qwen3", **MASKED), (1, 2, 1)) as (engine, live):
        leaving = [Live(engine, request(tokens_of(1 + 3 * i, i), FOREVER, decodes[i % 3])) for i in range(12)]
        await live[0].wait_pieces(2)
        leaving += [Live(engine, request(tokens_of(300, i), 5)) for i in range(4)]
        await live[0].wait_pieces(4)
        for each in leaving:
            each.task.cancel()
        outcomes = await asyncio.gather(*(each.task for each in leaving), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}


async def test_an_answer_that_is_left_has_cost_what_it_took(folder: Path) -> None:
    async with running(folder, (4,)) as chain, Engine(chain) as engine:
        leaving = Live(engine, request(tokens_of(9), FOREVER))
        await leaving.wait_pieces(4)
        leaving.task.cancel()
        await asyncio.wait([leaving.task])
        [left] = engine.stats.recent
        assert left.finish_reason == "abort" and left.queue_s is not None and left.num_steps >= 4


async def test_a_request_whose_reader_leaves_before_the_mlx_thread_sees_it_never_runs(folder: Path) -> None:
    """The thread is at a step, and finds the request and its end at once."""
    release = threading.Event()
    async with running(folder, (4,)) as chain, Engine(chain) as engine:
        held = asyncio.create_task(chain.thread.run(lambda: release.wait(8)))
        leaving = Live(engine, request(tokens_of(9), FOREVER))
        while not engine.stats.under_way:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        leaving.task.cancel()
        await asyncio.wait([leaving.task])
        release.set()
        await held
        await engine.answer(request(tokens_of(3), 4))
        assert not engine.sessions


async def test_a_slot_that_was_freed_serves_the_next_request_rightly(folder: Path, frames: Frames) -> None:
    """Cancelled with chunks still on their way: late results belong to no request."""
    asked = request(tokens_of(20, 5), 8)
    async with running_within(folder, (1, 2, 1), 512) as chain:
        [alone] = await solo(chain, [asked])
        async with Engine(chain) as engine:
            for turn in range(4):
                leaving = Live(engine, request(tokens_of(400, turn), 5))
                await frames.wait_window(lambda window, turn=turn: window.base >= CHUNK * turn)
                leaving.task.cancel()
                assert (await engine.answer(asked, chunk=CHUNK)).tokens == alone.tokens
                frames.clear()


# --- who is refused, who fails --------------------------------------------------------------------------------------


async def test_an_exception_in_one_requests_emit_fails_that_request_alone(models: Models) -> None:
    def fail(text: str) -> None:
        if text.startswith(","):
            raise KeyError("the client is gone")

    async with streaming(models("qwen3"), (1, 3)) as (engine, _):
        failing = Live(engine, request(tokens_of(4, 8), FOREVER), emit=fail)
        with pytest.raises(KeyError, match="the client is gone"):
            await failing.answer()
    assert failing.num_pieces == 2


# --- a chain that is lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["node-1 ends", "node-2 ends", "node-2 fails"])
async def test_a_chain_that_is_lost_fails_every_request_at_once_by_the_name_of_the_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Those that decode, that are fed, and that wait for memory; and those that come later."""
    run: Callable[..., mx.array] = Shard.__call__
    broken, name, error = threading.Event(), how.split()[0], ModelError if "fails" in how else StageLost

    def fail(shard: Shard, x: mx.array, *more: Any) -> Any:
        if broken.is_set() and shard.is_last:
            raise ModelError("no such kernel")
        return run(shard, x, *more)

    monkeypatch.setattr(Shard, "__call__", fail)
    async with serving(2) as nodes, opened(folder, (1, 2, 1), nodes) as chain, Engine(chain) as engine:
        live = [Live(engine, request(tokens_of(3 + 60 * (i % 3), i), 300)) for i in range(9)]
        await live[0].wait_pieces(2)
        if "fails" in how:
            broken.set()
        else:
            await nodes[int(name[-1]) - 1].listening.stop()
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(*(each.task for each in live), return_exceptions=True)
            for outcome in outcomes:
                assert type(outcome) is error and str(outcome).startswith(f"worker {name}: ")
                assert "ends" in how or str(outcome).endswith(": no such kernel")
            with pytest.raises(error, match=f"^worker {name}: "):
                await engine.answer(STREAMS[0])


@pytest.mark.parametrize("busy", [pytest.param(0, marks=pytest.mark.matrix), 1])
async def test_forty_cancels_while_a_stage_is_busy_do_not_flood_the_chain(folder: Path, busy: int) -> None:
    release = threading.Event()
    async with (
        serving(1) as [node],
        opened(folder, (2, 2), [node]) as chain,
        asyncio.timeout(20),
        Engine(chain) as engine,
    ):
        live = [Live(engine, request(tokens_of(3, i), FOREVER)) for i in range(40)]
        other = Live(engine, request(tokens_of(3, 101), 100))
        for each in (other, *live):
            await each.wait_pieces(1)
        held = asyncio.create_task((chain.thread, node.thread)[busy].run(lambda: release.wait(8)))
        for each in live:
            each.task.cancel()
        outcomes = await asyncio.gather(*(each.task for each in live), return_exceptions=True)
        release.set()
        await held
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
        assert len((await other.answer()).tokens) == 100


@pytest.mark.parametrize("error", [None, KeyError("x")])
async def test_leaving_the_engine_fails_its_requests_and_frees_slots(models: Models, error: Exception | None) -> None:
    async with running(models("qwen3").folder, (2, 2)) as chain:
        live: list[Live] = []
        try:
            async with Engine(chain) as engine:
                live += [Live(engine, request(tokens_of(3, i), FOREVER)) for i in range(3)]
                await live[-1].wait_pieces(2)
                if error:
                    raise error
        except KeyError as raised:
            assert raised is error
        outcomes = await asyncio.wait_for(asyncio.gather(*(each.task for each in live), return_exceptions=True), 3)
        assert {type(outcome) for outcome in outcomes} == {NodeBusy}
        await wait_freed(chain)
        [answer] = await solo(chain, [request(tokens_of(30), 8)])
        assert answer.tokens == models("qwen3").tokens(tokens_of(30), 8)


async def test_an_engine_that_shuts_down_or_has_shut_down_refuses_requests(folder: Path) -> None:
    async with running(folder, (2, 2)) as chain:
        async with Engine(chain) as engine:
            live = Live(engine, request(tokens_of(3), FOREVER))
            await live.wait_pieces(2)
            leaving = asyncio.create_task(engine.__aexit__(None))
            await asyncio.wait([live.task])
            assert not leaving.done()
            with pytest.raises(StageLost, match="has shut down"):
                await asyncio.wait_for(engine.answer(request(tokens_of(4), 3)), 3)
            await leaving
        with pytest.raises(StageLost, match="has shut down"):
            await asyncio.wait_for(engine.answer(request(tokens_of(4), 3)), 3)
        await wait_freed(chain)
