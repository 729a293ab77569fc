"""What one request has fed is there for the next: continued, copied, evicted, and never changed under anyone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.decoding.decode_options import Decode, make_cache_choice
from coordinator.engine import core
from coordinator.engine.engine import Engine
from coordinator.planning.plan import Plan
from coordinator.sessions import admission, session
from coordinator.sessions.cache_costs import CacheCosts, cache_costs
from coordinator.sessions.output import Answer
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Cache, Frame, Opening
from tests.integration.conftest import CHUNK, Layers, Models, Whole, opened, receive, running, send, serving
from tests.integration.many import SPLITS, Frames, Live, request, running_within, solo, tokens_of, wait_freed
from tests.integration.many import frames as frames
from tests.integration.test_hybrids import OTHERS as HYBRIDS
from tests.integration.upstream import window_of
from tests.integration.windows import MASKED
from tools.model_types.make import make_type
from worker.model.model_spec import ModelSpec

pytestmark = pytest.mark.usefixtures("in_turns")

WIDE: dict[str, Any] = {"config": {"mask_token_id": 90, "head_dim": 32}, "sharpen": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "full": ("qwen3", MASKED, make_cache_choice("full", None)),
    "sliding": ("gemma3_text", {}, make_cache_choice("full", None)),
    "recurrent": ("qwen3_5", {}, make_cache_choice("full", None)),
    "int8": ("qwen3", WIDE, make_cache_choice("int8", None)),
    "rotating": ("qwen3", MASKED, make_cache_choice("rotating", 14)),  # shorter than the prompts
}
NEW = tokens_of(6, 9)  # what the user says next


def rows_fed(frames: Sequence[Frame], since: int = 0) -> int:
    return sum(len(window.tokens) + window.masks for frame in frames[since:] for window in frame.windows)


def forks(frames: Sequence[Frame]) -> list[tuple[int, int]]:
    """(slot, the slot it is a copy of), in order."""
    return [(o.slot, o.fork_of) for frame in frames for o in frame.opened if o.HasField("fork_of")]


# --- the next turn of a conversation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        pytest.param(
            kind,
            layers,
            id=f"{kind}-{'+'.join(map(str, layers))}",
            marks=() if (number - at) % 3 == 0 else pytest.mark.matrix,
        )
        for number, kind in enumerate(KINDS)
        for at, layers in enumerate(SPLITS)
    ],
)
async def test_each_turn_of_a_conversation_feeds_only_what_is_new_in_the_same_slot(
    models: Models, frames: list[Frame], kind: str, layers: Layers
) -> None:
    """Nothing is copied, nothing else is held."""
    family, arguments, cache = KINDS[kind]
    async with running(models(family, **arguments).folder, layers) as chain:
        frames.clear()
        asked, answers, num_known = [request(tokens_of(26), 8, cache=cache)], list[Answer](), 0
        async with Engine(chain) as engine:
            for turn in range(3):
                before = len(frames)
                answers.append(await engine.answer(asked[-1], chunk=CHUNK))
                usage, num_new = answers[-1].usage, len(asked[-1].prompt) - num_known
                assert usage.num_reused == num_known
                assert rows_fed(frames, before) == usage.num_rows == num_new + asked[-1].max_tokens - 1
                so_far = (*asked[-1].prompt, *answers[-1].tokens)
                num_known = len(so_far) - 1  # the answer's last token was never fed
                text = (*so_far, *tokens_of(6, 9 + turn))  # what the user says next
                asked.append(request(text, 6 + turn, cache=cache, seed=3, temperature=0.8 * turn))
            statuses = await chain.statuses()
        assert {slot for slot, _ in forks(frames)} == {0} and {status.slots for status in statuses} == {1}
        alone = await solo(chain, asked[:-1])
    assert [each.tokens for each in answers] == [each.tokens for each in alone]


@pytest.mark.parametrize("decode", [Decode("diffusion", 8), Decode("diffusion-fast", 8, 1.0), Decode("ngram")])
async def test_windows_leave_a_prefix_that_can_be_continued(models: Models, decode: Decode) -> None:
    """Rejected drafts and MASK rows lie behind the end: they must not count as fed."""
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        async with Engine(chain) as engine:
            asked = [request(tokens_of(26), 13, decode)]
            answers = [await engine.answer(asked[0], chunk=CHUNK)]
            for _ in range(2):
                asked.append(request((*asked[-1].prompt, *answers[-1].tokens, *NEW), 13, decode))
                answers.append(await engine.answer(asked[-1], chunk=CHUNK))
                assert answers[-1].usage.num_reused >= len(asked[-1].prompt) - len(NEW) - 9
        alone = await solo(chain, asked)
    assert [each.tokens for each in answers] == [each.tokens for each in alone]


@pytest.mark.parametrize("num_read", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_interrupted_answer_leaves_what_was_fed(
    models: Models, frames: Frames, kind: str, num_read: int
) -> None:
    """A step is in flight then, or chunks of the prompt; its last tokens are not known to the reader."""
    family, arguments, cache = KINDS[kind]
    async with running(models(family, **arguments).folder, (1, 3)) as chain:
        async with Engine(chain) as engine:
            first = request(tokens_of(26), 8, cache=cache)
            text = (*first.prompt, *(await engine.answer(first, chunk=CHUNK)).tokens)
            frames.clear()
            broken = Live(engine, request((*text, *NEW), 40, cache=cache))
            await frames.wait_window(lambda window: True)
            await broken.wait_pieces(num_read)
            broken.task.cancel()
            last = request((*text, *NEW, *NEW), 8, cache=cache)
            found = await engine.answer(last, chunk=CHUNK)
        [alone] = await solo(chain, [last])
    assert found.tokens == alone.tokens
    assert found.usage.num_reused >= len(text) or kind not in ("full", "int8")  # others cannot be cut there


async def test_a_prompt_that_leaves_the_old_text_reuses_what_both_share(whole: Whole) -> None:
    """Two continuations of one text, several times: the kept text itself stays what it was."""
    async with running(whole.folder, (1, 2, 1)) as chain:
        asked = [request((*tokens_of(30), *tokens_of(4, 1 + i % 2)), 6, seed=i, temperature=i % 2) for i in range(5)]
        async with Engine(chain) as engine:
            await engine.answer(request(tokens_of(35), 8), chunk=CHUNK)
            found = [await engine.answer(each, chunk=CHUNK) for each in asked]
    assert all(each.usage.num_reused >= 30 for each in found)
    assert [each.tokens for each in found] == whole.tokens_of(asked)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *(("qwen3_5", (2, 3, 1)), ("gemma3_text", (1, 3)), ("falcon_h1", (2, 4))),
        *(pytest.param(name, (2, 4), marks=pytest.mark.matrix) for name in HYBRIDS if name != "falcon_h1"),
    ],
)
async def test_a_turn_that_leaves_out_thoughts_goes_on_from_a_snapshot_where_nothing_can_be_cut(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layers: Layers
) -> None:
    """The next one, another one from the same beginning, and one after that: the tokens of each alone."""
    monkeypatch.setattr(session, "LEAST_SAVED", 64)
    whole = name == "gemma3_text"
    folder = (
        models(name, config={"max_position_embeddings": 4096}).folder if whole else make_type(tmp_path / name, name)
    )
    text = tokens_of(160)
    asked = [
        request(text, 9, turn_ends=(70, 150)),
        request((*text[:155], *tokens_of(70, 3)), 9, seed=3, temperature=0.8, turn_ends=(220,)),
        request((*text[:80], *tokens_of(10, 4)), 9),
        request((*text[:155], *tokens_of(70, 3)[:68], 5), 9),
    ]
    async with running(folder, layers) as chain:
        async with Engine(chain) as engine:
            found = [await engine.answer(each, chunk=64) for each in asked]
        alone = await solo(chain, asked[1:], chunk=64)
    assert [each.usage.num_reused for each in found] == [0, 150, 70, 220]
    assert [each.tokens for each in found[1:]] == [each.tokens for each in alone]


# --- copies of what is still in use ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layers"),
    [pytest.param("full", (4,), marks=pytest.mark.matrix), ("full", (1, 2, 1)), ("int8", (1, 3))],
    ids=str,
)
async def test_two_live_requests_with_one_long_prefix_feed_it_once_and_both_are_right(
    models: Models, frames: list[Frame], kind: str, layers: Layers
) -> None:
    """The source goes on while and after it was copied; the copy ends first, then another is made."""
    family, arguments, cache = KINDS[kind]
    long = request(tokens_of(40), 44, cache=cache)
    short = [request((*tokens_of(40)[:36], *tokens_of(5, i)), 6, cache=cache, seed=i, temperature=1.0) for i in (1, 2)]
    async with running(models(family, **arguments).folder, layers) as chain:
        frames.clear()
        async with Engine(chain) as engine:
            source = Live(engine, long)
            await source.wait_pieces(3)
            copies = [await Live(engine, each).answer() for each in short]
            assert not source.task.done()
            found = [await source.answer(), *copies]
        assert [slot for _, slot in forks(frames)] == [0, 0]
        alone = await solo(chain, [long, *short])
    assert [each.usage.num_reused for each in found] == [0, 36, 36]
    assert [each.tokens for each in found] == [each.tokens for each in alone]


async def test_a_copy_of_a_slot_being_fed_has_what_was_fed_by_then(whole: Whole, frames: Frames) -> None:
    async with running(whole.folder, (1, 2, 1)) as chain:
        frames.clear()
        asked = [request(tokens_of(200), 6), request((*tokens_of(200)[:150], 5, 6), 6), request(tokens_of(100), 6)]
        async with Engine(chain) as engine:
            live = [Live(engine, asked[0])]
            for number in (1, 2):
                await frames.wait_window(lambda window, number=number: window.base >= 3 * CHUNK * number)
                live.append(Live(engine, asked[number]))
            found = [await each.answer() for each in live]
    assert 0 < found[1].usage.num_reused < 150 and 0 < found[2].usage.num_reused < 100
    assert [each.tokens for each in found] == whole.tokens_of(asked)


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(4,), (1, 2, 1)], ids=str)
async def test_kept_prefixes_give_way_to_requests_on_every_stage(folder: Path, layers: Layers) -> None:
    """Room for three slots: a fourth text evicts the oldest, on every stage."""
    async with running_within(folder, layers, 24, slots=3) as chain:
        budgets = cache_costs(chain.plan, chain.spec).budgets
        async with Engine(chain) as engine:
            for number in range(8):
                await engine.answer(request(tokens_of(20, number), 4), chunk=CHUNK)
                statuses = await chain.statuses()
                assert [status.slots for status in statuses] == [min(number + 1, 3)] * len(layers)
                held = [status.cache_bytes for status in statuses]
                assert all(0 < bytes_ <= budget for bytes_, budget in zip(held, budgets, strict=True))
            newest = await engine.answer(request((*tokens_of(20, 7), 5), 4), chunk=CHUNK)
            oldest = await engine.answer(request((*tokens_of(20, 1), 5), 4), chunk=CHUNK)
        assert (newest.usage.num_reused, oldest.usage.num_reused) == (20, 0)
        await wait_freed(chain)


async def test_requests_wait_for_memory_and_no_stage_ever_holds_more_than_its_budget(whole: Whole) -> None:
    asked = [request(tokens_of(30 + 30 * (i % 4), i % 3), 6) for i in range(9)]
    async with running_within(whole.folder, (1, 3), 256, slots=2) as chain:
        budgets = cache_costs(chain.plan, chain.spec).budgets
        async with Engine(chain) as engine:
            live = [Live(engine, each) for each in asked]
            while not all(each.task.done() for each in live):
                held = [status.cache_bytes for status in await chain.statuses()]
                assert all(bytes_ <= budget for bytes_, budget in zip(held, budgets, strict=True)), held
            found = [await each.answer() for each in live]
        await wait_freed(chain)
    assert [each.tokens for each in found] == whole.tokens_of(asked)


@pytest.mark.parametrize("slots", [1, 2], ids=["in its place", "as a copy"])
async def test_a_short_continuation_of_a_long_text_keeps_to_what_is_reserved(models: Models, slots: int) -> None:
    folder = models("qwen3", config={"max_position_embeddings": 4000}).folder
    async with running_within(folder, (2, 2), 1024, slots) as chain, Engine(chain) as engine:
        await engine.answer(request(tokens_of(900), 4), chunk=256)
        for number in (1, 2, 3):
            each = request((*tokens_of(900)[:30], *tokens_of(5, number)), 4)
            assert (await engine.answer(each)).usage.num_reused >= 30
            reserved = engine.scheduler.slots.reserved
            held = [status.cache_bytes for status in await chain.statuses()]
            assert all(bytes_ <= most for bytes_, most in zip(held, reserved, strict=True)), (held, reserved)


async def test_a_copy_of_a_slot_that_the_same_frame_closes_is_made_before(whole: Whole) -> None:
    tokens = tokens_of(9)
    async with serving(1) as nodes, opened(whole.folder, (2, 2), nodes) as chain:
        await send(chain, Frame(epoch=1, step=50, opened=[Opening(slot=0)], windows=[window_of(tokens[:8], 0)]))
        await receive(chain)
        opening = Opening(slot=1, fork_of=0)
        await send(chain, Frame(epoch=1, step=51, opened=[opening], closed=[0], windows=[window_of(tokens, 8, slot=1)]))
        assert (await receive(chain)).result.samples[0].token == whole.tokens(tokens, 1)[0]
        assert [status.slots for status in await chain.statuses()] == [1, 1]


ROWS = 256  # by which caches grow
ANSWERS = [request(tokens_of(220 + 9 * i, i), 45, seed=i, temperature=i % 2) for i in range(3)]


def with_room_for_three(plan: Plan, spec: ModelSpec) -> CacheCosts:
    """The costs on stages that have memory for so many small caches."""
    found = cache_costs(plan, spec)
    return replace(found, budgets=tuple(3 * nbytes for nbytes in found.bytes_of(Cache(), ROWS)))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
async def test_streams_that_gave_way_are_as_alone(models: Models, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Qwen3.5 has recurrent states, which cannot be cut."""
    preempted: list[Session] = []
    begun: list[bool] = []
    preempt = Session.preempt

    def noted(session: Session) -> None:
        preempted.append(session)
        preempt(session)
        begun.append(engine.has_begun([session.request]))

    async with running(models(family).folder, (1, 3)) as chain:
        monkeypatch.setattr(core, "cache_costs", with_room_for_three)
        monkeypatch.setattr(Session, "preempt", noted)
        for name, tokens in (("GROWTH", 16), ("LOW", 12), ("LARGEST_WINDOW", 8)):
            monkeypatch.setattr(admission, name, tokens)
        async with Engine(chain) as engine:
            found = await asyncio.gather(*(engine.answer(each, chunk=64) for each in ANSWERS))
    alone = [models(family).tokens(each.prompt, each.max_tokens, each.sampling) for each in ANSWERS]
    assert [each.tokens for each in found] == alone
    assert preempted and preempted[0].num_prompt > len(ANSWERS[0].prompt), "the oldest goes on"
    assert all(begun), "one that waits for memory again is not refused any more"
