"""A request as a stream of pieces: bounded, failing alone, ending when it is closed."""

from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine
from coordinator.sessions.output import Answer
from coordinator.sessions.text import TextParser
from tests.integration.conftest import CHUNK, Models, running
from tests.integration.many import Live, request, running_within, solo, tokens_of, wait_freed, wait_slots
from tests.integration.windows import MASKED, Words
from worker.errors import ModelError, QueueFull, ReaderLost

LAYERS = (1, 3)
ASKED = request(tokens_of(20), 12, seed=3, temperature=0.9, logprobs=3)


async def test_pieces_folded_are_the_answer(models: Models) -> None:
    async with running(models("qwen3").folder, LAYERS) as chain:
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


async def test_a_reader_that_is_behind_pauses_its_own_session_only(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("core", "engine"):
        monkeypatch.setattr(f"coordinator.engine.{module}.MOST_UNREAD", 6)
    slow = request(tokens_of(9, 1), 40)
    async with running(models("qwen3").folder, LAYERS) as chain:
        [expected] = await solo(chain, [slow])
        async with Engine(chain) as engine, aclosing(engine.generate(slow, chunk=CHUNK)) as pieces:
            found = Answer()
            found.add(await anext(pieces))
            other = Live(engine, request(tokens_of(9, 2), 40))
            assert len((await other.answer()).tokens) == 40
            [session] = engine.sessions
            assert session.is_paused and session.num_generated == 1 + 6, "one read, six unread, and not one more"
            async for piece in pieces:
                found.add(piece)
    assert found.tokens == expected.tokens


async def test_a_reader_that_never_comes_back_loses_its_request_and_nothing_else(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("core", "engine"):
        monkeypatch.setattr(f"coordinator.engine.{module}.MOST_UNREAD", 4)
    monkeypatch.setattr("coordinator.engine.core._UNREAD_S", 0.05)
    async with running(models("qwen3").folder, LAYERS) as chain, Engine(chain) as engine:
        async with aclosing(engine.generate(request(tokens_of(9), 300), chunk=CHUNK)) as pieces:
            await anext(pieces)
            await wait_slots(chain, 0)
            with pytest.raises(ReaderLost, match="was not read"):
                while True:
                    await anext(pieces)
        monkeypatch.setattr("coordinator.engine.core._UNREAD_S", 30.0)  # this reader is only as slow as the machine
        assert len((await engine.answer(ASKED)).tokens) == 12


class Broken:
    """A detokenizer that fails at its fifth token, or at the end, where it is called."""

    def __init__(self, place: str, error: Exception) -> None:
        self._place, self._error = place, error
        self._num_tokens = 0

    def add_token(self, token: int) -> None:
        self._num_tokens += 1
        self._fail_at("add_token", self._num_tokens == 5)

    @property
    def last_segment(self) -> str:
        self._fail_at("last_segment", self._num_tokens == 5)
        return "x"

    def finalize(self) -> None:
        self._fail_at("finish", True)

    def _fail_at(self, place: str, now: bool) -> None:
        if place == self._place and now:
            raise self._error


async def test_a_tokenizer_that_breaks_anywhere_fails_its_own_request_only(models: Models) -> None:
    bug, hole = RuntimeError("broke"), TypeError("sequence item 0: expected str instance, NoneType found")
    async with running(models("qwen3").folder, LAYERS) as chain:
        async with Engine(chain) as engine:
            other = Live(engine, request(tokens_of(3, 1), 100))
            for place, error, raised, said in (
                ("add_token", bug, RuntimeError, "broke"),
                ("last_segment", bug, RuntimeError, "broke"),
                ("finish", bug, RuntimeError, "broke"),
                ("add_token", hole, ModelError, r"no text for token \d+ \(TypeError"),
            ):
                text: Any = TextParser(Broken(place, error), ())
                with pytest.raises(raised, match=said):
                    await engine.answer(request(tokens_of(3), 12), parser=text)
            assert len((await other.answer()).tokens) == 100
        await wait_freed(chain)


async def test_a_request_that_waits_too_long_for_memory_is_refused(models: Models) -> None:
    async with (
        running_within(models("qwen3").folder, LAYERS, 256) as chain,
        Engine(chain, max_wait_s=0.05) as engine,
        aclosing(engine.generate(request(tokens_of(9, 1), 200), chunk=CHUNK)) as first,
    ):
        await anext(first)
        with pytest.raises(QueueFull, match="waited 0 s for memory; try again later"):
            await engine.answer(request(tokens_of(9, 2), 200))
        assert engine.scheduler.num_waiting == 0
        assert (await anext(first)).tokens, "whoever has a slot is not bothered"
