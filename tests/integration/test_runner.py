"""Requests that share a chain come, leave and fail without touching each other; a lost chain fails them all."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine
from coordinator.sessions.output import Output
from coordinator.sessions.request import Request
from coordinator.sessions.text import TextParser
from protos.brigade_pb2 import Frame
from tests.integration.conftest import CHUNK, Models, opened, running, serving
from tests.integration.many import Frames, Live, request, running_within, solo, tokens_of, wait_freed, wait_slots
from tests.integration.many import frames as frames
from tests.integration.windows import MASKED, Words
from worker.compute.shard import Shard
from worker.errors import ModelError, StageLost

FOREVER = 450  # tokens: more than any test waits for
STREAMS = [request(tokens_of(4 + 9 * i, i), 24, seed=i, temperature=i % 2) for i in range(3)]


async def assert_cancelled(live: Live) -> None:
    live.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await live.task


# --- who leaves -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(4,), (1, 2, 1)], ids=str)
async def test_cancelling_while_decoding_frees_the_slot_on_every_stage_and_changes_no_tokens(
    models: Models, frames: list[Frame], layers: tuple[int, ...]
) -> None:
    async with running(models("qwen3").folder, layers) as chain:
        alone = await solo(chain, STREAMS)
        async with Engine(chain) as engine:
            leaving = Live(engine, request(tokens_of(7, 9), FOREVER))
            live = [Live(engine, each) for each in STREAMS]
            await leaving.wait_pieces(3)
            await live[-1].wait_pieces(3)
            sent = len(frames)
            await assert_cancelled(leaving)
            found = [await each.answer() for each in live]
            assert [0] in [list(frame.closed) for frame in frames[sent : sent + 1 + len(layers)]]
            await wait_slots(chain, len(STREAMS))  # kept for their prefixes
        await wait_freed(chain)
    assert [each.tokens for each in found] == [each.tokens for each in alone]


async def test_a_cancelled_request_alone_is_gone_with_the_very_next_frame(models: Models, frames: list[Frame]) -> None:
    async with running(models("qwen3").folder, (1, 2, 1)) as chain, Engine(chain) as engine:
        leaving = Live(engine, request(tokens_of(7), FOREVER))
        await leaving.wait_pieces(3)
        sent = len(frames)
        await assert_cancelled(leaving)
        await wait_freed(chain)
        assert [list(frame.closed) for frame in frames[sent:]] == [[0]]
        assert engine.scheduler.num_waiting == 0 and not engine.scheduler.slots.num_kept


async def test_cancelling_while_the_prompt_is_fed_frees_its_slot_and_changes_no_tokens(
    models: Models, frames: Frames
) -> None:
    async with running(models("gemma3_text").folder, (1, 2, 1)) as chain:
        alone = await solo(chain, STREAMS)
        async with Engine(chain) as engine:
            live = [Live(engine, each) for each in STREAMS]
            await live[0].wait_pieces(2)
            frames.clear()
            leaving = Live(engine, request(tokens_of(400, 9), 5))
            await frames.wait_window(lambda window: len(window.tokens) == CHUNK, count=5)
            await assert_cancelled(leaving)
            found = [await each.answer() for each in live]
            assert leaving.num_pieces == 0
            await wait_slots(chain, len(STREAMS))
        await wait_freed(chain)
    assert sum(len(w.tokens) for frame in frames for w in frame.windows if w.slot == 3) < 400
    assert [each.tokens for each in found] == [each.tokens for each in alone]


async def test_many_cancels_at_once_free_all_their_slots_and_leave_the_others(models: Models) -> None:
    """While waiting, while prompts are fed and while decoding."""
    async with running(models("qwen3", **MASKED).folder, (1, 2, 1)) as chain:
        alone = await solo(chain, STREAMS)
        async with Engine(chain) as engine:
            decodes = [Decode(), Decode("diffusion", 8), Decode("ngram")]
            leaving = [Live(engine, request(tokens_of(1 + 3 * i, i), FOREVER, decodes[i % 3])) for i in range(12)]
            live = [Live(engine, each) for each in STREAMS]
            await live[0].wait_pieces(2)
            leaving += [Live(engine, request(tokens_of(300, i), 5)) for i in range(4)]
            await live[0].wait_pieces(4)
            for each in leaving:
                each.task.cancel()
            outcomes = await asyncio.gather(*(each.task for each in leaving), return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
            found = [await each.answer() for each in live]
            await wait_slots(chain, len(STREAMS))
        await wait_freed(chain)
    assert [each.tokens for each in found] == [each.tokens for each in alone]


async def test_a_slot_that_was_freed_serves_the_next_request_rightly(models: Models, frames: Frames) -> None:
    """Cancelled with chunks still on their way: late results belong to no request."""
    asked = request(tokens_of(20, 5), 8)
    async with running_within(models("qwen3").folder, (1, 2, 1), 512) as chain:
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

    async with running(models("qwen3").folder, (1, 3)) as chain:
        alone = await solo(chain, STREAMS)
        async with Engine(chain) as engine:
            failing = Live(engine, request(tokens_of(4, 8), FOREVER), emit=fail)
            live = [Live(engine, each) for each in STREAMS]
            with pytest.raises(KeyError, match="the client is gone"):
                await failing.answer()
            found = [await each.answer() for each in live]
            await wait_slots(chain, len(STREAMS))
    assert [each.tokens for each in found] == [each.tokens for each in alone]
    assert failing.num_pieces == 2


async def test_a_stop_string_ends_one_of_several_requests_and_no_other(models: Models) -> None:
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        alone = await solo(chain, STREAMS)
        text = "".join(f" {token}" for token in alone[1].tokens)
        stop = "".join(f" {token}" for token in alone[1].tokens[12:14])
        for decode in (Decode(), Decode("ngram"), Decode("diffusion", 8)):
            asked = [request(each.prompt, each.max_tokens, decode, sampling=each.sampling) for each in STREAMS]
            pieces: list[list[Output]] = [[], [], []]
            async with Engine(chain) as engine:
                found = await asyncio.gather(*(
                    engine.answer(each, parser=TextParser(Words(), stops), take=out.append, chunk=CHUNK)
                    for each, stops, out in zip(asked, ([], [stop], []), pieces, strict=True)
                ))  # fmt: skip
            assert "".join(piece.text for piece in pieces[1]) == text[: text.index(stop)]
            assert [each.finish_reason for each in found] == ["length", "stop", "length"]
            assert [found[i].tokens for i in (0, 2)] == [alone[i].tokens for i in (0, 2)]


# --- a chain that is lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [1, 2])
async def test_a_dead_worker_fails_every_request_at_once_by_its_name_and_later_ones_too(
    models: Models, dead: int
) -> None:
    """Those that decode, that are fed, and that wait for memory."""
    async with serving(2) as nodes, opened(models("qwen3").folder, (1, 2, 1), nodes) as chain:
        async with Engine(chain) as engine:
            live = [Live(engine, each) for each in endless()]
            await live[0].wait_pieces(2)
            await nodes[dead - 1].listening.stop()
            async with asyncio.timeout(5):
                outcomes = await asyncio.gather(*(each.task for each in live), return_exceptions=True)
                for outcome in outcomes:
                    assert isinstance(outcome, StageLost) and str(outcome).startswith(f"worker node-{dead}: ")
                with pytest.raises(StageLost, match=f"^worker node-{dead}: "):
                    await engine.answer(STREAMS[0])
        assert all(each.task.done() for each in live)


def endless() -> Sequence[Request]:
    return [request(tokens_of(3 + 60 * (i % 3), i), 300) for i in range(9)]


async def test_an_error_in_one_stage_fails_every_request_and_names_the_node(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Callable[..., mx.array] = Shard.__call__
    broken = threading.Event()

    def fail(shard: Shard, x: mx.array, *more: Any) -> Any:
        if broken.is_set() and shard.is_last:
            raise ModelError("no such kernel")
        return run(shard, x, *more)

    monkeypatch.setattr(Shard, "__call__", fail)
    async with running(models("qwen3").folder, (1, 2, 1)) as chain, Engine(chain) as engine:
        live = [Live(engine, each) for each in endless()]
        await live[0].wait_pieces(2)
        broken.set()
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(*(each.task for each in live), return_exceptions=True)
        assert {(type(each), str(each)) for each in outcomes} == {(ModelError, "worker node-2: no such kernel")}
