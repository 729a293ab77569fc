"""Steps that are built before their frames come: the tokens are those of a step that is built on arrival."""

import shutil
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.decoding.decode_options import make_cache_choice
from coordinator.engine.engine import Engine, generate_once
from coordinator.sessions.output import Answer
from protos.brigade_pb2 import Frame, Opening, Piece, Result, Sampling, Store, Window
from tests.integration.conftest import Layers, Models, Whole, build_nothing_ahead, running
from tests.integration.many import request, solo, together, tokens_of
from tests.integration.upstream import window_of
from tools.model_types.make import make_type
from worker.compute.ahead import Ready, StepsAhead, looks_at_numbers
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.compute.step import Step
from worker.model.checkpoint import open_folder
from worker.model.describe import DTYPES, describe

FAMILIES = ("qwen3", "gemma3_text", "qwen3_5", "qwen3_moe")
REQUESTS = [
    request(tokens_of(9, 1), 8),
    request(tokens_of(5, 2), 9, seed=3, temperature=1.0, top_p=0.9),
    request(tokens_of(7, 3), 7, seed=5, temperature=1.2, repetition_penalty=1.4),
    request(tokens_of(4, 4), 8, logprobs=3),
]
FED = [tuple(tokens_of(6 + 3 * slot, slot)) for slot in range(2)]
NEXT = [(*tokens, 7 + slot) for slot, tokens in enumerate(FED)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every frame whether its step was built when it came."""
    found: list[bool] = []
    take = StepsAhead.take

    def note(ahead: StepsAhead, frame: Frame) -> Ready | None:
        built = take(ahead, frame)
        found.append(built is not None)
        return built

    monkeypatch.setattr(StepsAhead, "take", note)
    return found


async def answers(models: Models, family: str, layers: Layers) -> list[Answer]:
    async with running(models(family).folder, layers) as chain:
        return [*await solo(chain, REQUESTS), *await together(chain, REQUESTS)]


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        pytest.param(family, layers, marks=() if number % 2 == at else pytest.mark.matrix)
        for number, family in enumerate(FAMILIES)
        for at, layers in enumerate([(4,), (1, 2, 1)])
    ],
)
async def test_tokens_and_logprobs_are_bit_for_bit_those_of_steps_built_on_arrival(
    models: Models, taken: list[bool], family: str, layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await answers(models, family, layers)
    assert any(taken)
    build_nothing_ahead(monkeypatch)
    taken.clear()
    expected = await answers(models, family, layers)
    assert not any(taken)
    assert [each.samples for each in found] == [each.samples for each in expected]


async def test_steps_are_ready_for_every_request_of_a_runner(folder: Path, taken: list[bool]) -> None:
    """Though slots of those that have ended are kept, with what was built for them.

    In a chain: on one node whose device computes on this very thread nothing is gained by building before a frame.
    """
    shares = []
    async with running(folder, (1, 2, 1)) as chain, Engine(chain) as engine:
        for number in range(4):
            taken.clear()
            await engine.answer(request(tokens_of(6, number), 12, repetition_penalty=1.0 + number % 2))
            shares.append(sum(taken) / len(taken))
    assert min(shares) > 0  # a frame may come before its step is built


# where draws look back only a graph is
SAMPLINGS = {"built": Sampling(repetition_penalty=1.3), "launched": Sampling(), "launched twice": Sampling()}


CACHES = [make_cache_choice("full", None), make_cache_choice("rotating", 14), make_cache_choice("int8", None)]
GROUPS_OF_32: dict[str, Any] = {"config": {"head_dim": 32}}  # as int8 needs them


@pytest.mark.parametrize("layers", [(4,), (1, 3)])
async def test_every_kind_of_cache_is_gone_on_with_over_the_ends_of_its_buffers(
    models: Models, taken: list[bool], layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers end at 256 rows; a rotating cache lets go of rows there. Answers end and begin beside each other."""
    asked = [
        request(tokens_of(length, length), 6 + 2 * number, cache=cache, **sampling)
        for number, cache in enumerate(CACHES)
        for length, sampling in zip((11, 251), ({}, {"repetition_penalty": 1.3})[:: (-1) ** number], strict=True)
    ]
    found = []
    for is_ahead in (True, False):
        if not is_ahead:
            build_nothing_ahead(monkeypatch)
        async with running(models("qwen3", **GROUPS_OF_32).folder, layers) as chain:
            alone = [await generate_once(chain, each, chunk=64) for each in asked[::2]]
            found.append([each.samples for each in [*alone, *await together(chain, asked, chunk=64)]])
        assert any(taken) == is_ahead
        taken.clear()
    assert found[0] == found[1]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr("worker.compute.executor.SHORT_STEP_NS", 1 << 62)


def idle_engine(whole: Whole, slots: dict[int, Slot] | None = None) -> Executor:
    checkpoint = open_folder(whole.folder)
    return Executor(Shard(checkpoint, 0, 4), 0, describe(checkpoint).dtype, slots=slots)


def engine_of(whole: Whole, way: str, slots: dict[int, Slot] | None = None) -> tuple[Executor, list[int]]:
    """Of the whole model, after a step of one token for each slot: it gave these. The next step is there, or not."""
    engine = idle_engine(whole, slots)
    opened = [Opening(slot=slot, sampling=SAMPLINGS[way.removeprefix("not ")]) for slot in range(2)]
    run(engine, [window_of(FED[slot], 0, slot) for slot in range(2)], opened=opened)
    step = engine.begin(Frame(windows=[window_of(NEXT[slot], len(FED[slot]), slot) for slot in range(2)]), (), 0, 0)
    result, _ = engine.finish(step)
    assert isinstance(result, Result)
    if way == "built":
        engine.build_ahead()
    elif not way.startswith("not"):
        for _ in range(1 + (way == "launched twice")):
            launch(engine, step)
    return engine, [sample.token for sample in result.samples]


def launch(engine: Executor, step: Step) -> None:
    if outputs := engine.launch_ahead(step, is_finished=True):
        outputs.evaluate()


def all_ready(engine: Executor) -> list[Ready]:
    first = engine.ahead.ready
    return [*first, *(each.following for each in first if each.following)]


def run(
    engine: Executor, windows: Sequence[Window], **more: Sequence[Opening] | Sequence[int] | Sequence[Store]
) -> Result:
    output = engine.step(Frame(windows=windows, **more), received=0)  # type: ignore[arg-type]
    assert isinstance(output, Result)
    return output


def more(slot: int, *tokens: int) -> Window:
    return window_of((*NEXT[slot], *tokens), len(NEXT[slot]), slot)


def newest(slot: int, tokens: Sequence[int]) -> Window:
    """The last of some tokens behind those of NEXT."""
    return window_of((*NEXT[slot], *tokens), len(NEXT[slot]) + len(tokens) - 1, slot)


# each ends with a window of slot 1, and leaves it with the tokens that are named
WRONG: dict[str, tuple[Frame, tuple[int, ...]]] = {
    "two tokens": (Frame(windows=[more(0, 1, 2), more(1, 1)]), (*NEXT[1], 1)),
    "one slot alone": (Frame(windows=[more(1, 17)]), (*NEXT[1], 17)),
    "the other order": (Frame(windows=[more(1, 18), more(0, 17)]), (*NEXT[1], 18)),
    "a slot closes": (Frame(windows=[more(1, 17)], closed=[0]), (*NEXT[1], 17)),
    "a slot is copied": (Frame(windows=[more(1, 17)], opened=[Opening(slot=2, fork_of=0)]), (*NEXT[1], 17)),
    "a slot begins anew": (Frame(windows=[window_of(FED[1], 0, 1)], opened=[Opening(slot=1)]), FED[1]),
    "another token instead": (Frame(windows=[window_of((*FED[1], 3), len(FED[1]), 1)]), (*FED[1], 3)),
}


@pytest.mark.parametrize(
    ("family", "name", "way"),
    [
        pytest.param(family, name, way, marks=() if (i + j + k) % 3 == 0 else pytest.mark.matrix)
        for i, family in enumerate(["qwen3", "gemma3_text", "qwen3_5"])
        for j, name in enumerate(WRONG)
        for k, way in enumerate(SAMPLINGS)
        if (family, name) != ("qwen3_5", "another token instead")  # a recurrent layer takes nothing back
    ],
)
def test_a_step_that_is_not_asked_for_leaves_no_trace(models: Models, family: str, name: str, way: str) -> None:
    frame, tokens = WRONG[name]
    results = []
    for each in (way, f"not {way}"):
        slots: dict[int, Slot] = {}
        engine, _ = engine_of(models(family), each, slots)
        ready = [weakref.ref(step) for step in all_ready(engine)]
        assert len(ready) == (each == way) * (1 + (way == "launched twice"))
        found = run(engine, frame.windows, opened=frame.opened, closed=frame.closed)
        assert [step() for step in ready] == [None] * len(ready)  # its graph and what it held are gone
        assert all(cache.length == len(slot.history) for slot in slots.values() for cache in slot.caches.own)
        after = run(engine, [window_of((*tokens, 5), len(tokens), 1)])
        results.append(([*found.samples, *after.samples], engine.cache_bytes))
    assert results[0] == results[1] and len(results[0][0]) == len(frame.windows) + 1


@pytest.mark.parametrize("way", SAMPLINGS)
def test_a_slot_is_stored_as_it_is_before_the_step_that_is_ready(models: Models, way: str) -> None:
    results = []
    for each in (way, f"not {way}"):
        engine, given = engine_of(models("qwen3"), each)
        end = len(NEXT[0])
        store = Store(slot=0, piece=Piece(end=end), prefix_hash=newest(0, [0]).prefix_hash)
        step = engine.begin(Frame(stores=[store]), (), 0, 0)
        engine.finish(step)
        assert step.to_store
        rows = [array.tolist() for segment in step.to_store for array in segment.arrays]
        after = run(engine, [newest(slot, [token]) for slot, token in enumerate(given)])
        results.append((rows, list(after.samples)))
    assert results[0] == results[1]


@pytest.mark.parametrize(("family", "way"), [*(("qwen3", way) for way in SAMPLINGS), ("qwen3_5", "launched twice")])
def test_steps_that_are_asked_for_are_not_built_again_and_write_their_buffers_in_place(
    models: Models, monkeypatch: pytest.MonkeyPatch, family: str, way: str
) -> None:
    """What there was before must be let go of by then: MLX would copy every buffer at every step."""
    found, grown = [], []
    for each in (f"not {way}", way):
        engine, given = engine_of(models(family), each)
        if each == way:
            monkeypatch.setattr(Shard, "__call__", None)
        fed, samples, peaks = [[token] for token in given], [], []
        for left in (1, 0) if way == "launched twice" else (0,):
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            samples += run(engine, [newest(slot, tokens) for slot, tokens in enumerate(fed)]).samples
            peaks.append(mx.get_peak_memory() - before)
            assert each != way or len(all_ready(engine)) == left
            for tokens, sample in zip(fed, samples[-len(fed) :], strict=True):
                tokens.append(sample.token)
        found.append(samples)
        grown.append(max(peaks))
    assert found[0] == found[1]
    assert grown[1] < grown[0] + 256 * 2 * 16 * 4, "the keys of one slot in one layer"


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5"])
@pytest.mark.parametrize("way", ["launched", "launched twice"])
def test_a_slot_that_is_left_out_of_a_launched_step_goes_on_later(models: Models, family: str, way: str) -> None:
    results = []
    for each in (way, f"not {way}"):
        engine, tokens = engine_of(models(family), each)
        given = [[token] for token in tokens]
        for slot in (1, 1, 0, 0):
            (sample,) = run(engine, [newest(slot, given[slot])]).samples
            given[slot].append(sample.token)
        results.append(given)
    assert results[0] == results[1]


def test_a_launched_step_takes_from_its_launch_or_the_end_of_the_step_before(models: Models) -> None:
    """Not from the arrival of its frame: the device would seem idle, and the time spent on the way."""
    engine, tokens = engine_of(models("qwen3"), "launched")
    frame, received = Frame(windows=[newest(slot, [token]) for slot, token in enumerate(tokens)]), time.monotonic_ns()
    timing = engine.step(frame, received).timings[-1]
    assert timing.started == timing.taken < received < timing.computed


def test_a_long_step_has_one_behind_it_and_not_two(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes next would have to wait for both."""
    monkeypatch.setattr("worker.compute.executor.SHORT_STEP_NS", 0)
    engine, _ = engine_of(models("qwen3"), "launched twice")
    assert len(all_ready(engine)) == 1


def test_nothing_is_launched_into_a_cache_that_has_no_room(models: Models) -> None:
    """It would let go of rows, or take memory, for a step that may never be asked for."""
    engine, tokens = idle_engine(models("qwen3")), tokens_of(256, 1)
    run(engine, [window_of(tokens[:-2], 0)], opened=[Opening(slot=0)])
    launched = []
    for length in (255, 256):
        step = engine.begin(Frame(windows=[window_of(tokens[:length], length - 1)]), (), 0, 0)
        engine.finish(step)
        launch(engine, step)
        launch(engine, step)
        launched.append(len(all_ready(engine)))
    assert launched == [1, 0]


@pytest.mark.skipif(not shutil.which("g++"), reason="MLX compiles for a CPU with it")
def test_a_forward_that_looks_at_numbers_is_known(tmp_path: Path) -> None:
    """mlx-lm's dbrx lists the experts that it has chosen: of a placeholder they would be any."""
    for name, expected in (("dbrx", True), ("phimoe", False)):
        checkpoint = open_folder(make_type(tmp_path / name, name))
        shards = [Shard(checkpoint, *layers) for layers in ((0, 1), (1, 2))]
        found = [looks_at_numbers(shard, DTYPES[describe(checkpoint).dtype]) for shard in shards]
        assert found == [expected, expected]
    mx.disable_compile()  # as without a C++ compiler
    try:
        assert looks_at_numbers(shards[0], mx.float32), "it cannot be known"
    finally:
        mx.enable_compile()


def test_a_slot_that_has_failed_is_not_gone_on_with(models: Models) -> None:
    """Its next draw would be refused as this one was, though it was not asked for."""
    engine = idle_engine(models("qwen3"))
    refused = Opening(slot=1, sampling=Sampling(temperature=1.0, top_k=1 << 20, repetition_penalty=1.3))
    opened = [Opening(slot=0, sampling=SAMPLINGS["built"]), refused]
    (failure,) = run(engine, [window_of((5,), 0, 0), window_of((5,), 0, 1)], opened=opened).failures
    assert (failure.slot, failure.kind) == (1, "SamplingError")
    engine.build_ahead()
    assert [list(step.slots) for step in engine.ahead.ready] == [[0]]
