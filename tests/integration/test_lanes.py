"""Many requests at once, in lanes, are what each is alone, token for token."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.decoding.decode_options import Decode, make_cache_choice
from coordinator.engine.engine import Engine
from coordinator.planning.costs import LaneChooser
from coordinator.sessions.request import Request
from tests.integration.conftest import CHUNK, Layers, Models, Pass, running
from tests.integration.many import SPLITS, Live, request, solo, together, tokens_of
from tests.integration.many import two_lanes as two_lanes
from tests.integration.windows import BIASED, MASKED, assert_same_samples
from worker.compute.executor import Executor
from worker.errors import InternalError

FAMILIES = ("qwen3", "llama", "gemma3_text", "qwen3_5", "qwen3_moe")
WIDE: dict[str, Any] = {"config": {"mask_token_id": 90, "head_dim": 32}, "sharpen": 4.0}  # int8 needs groups of 32
PENALISED: dict[str, Any] = {
    "seed": 5, "temperature": 1.5, "repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.3,
}  # fmt: skip
MIXED = [  # prompts from one row to six chunks, several of several chunks
    request(tokens_of(1, 1), 9),
    request(tokens_of(5, 2), 6, seed=3, temperature=1.0),
    request(tokens_of(CHUNK + 3, 3), 8, **PENALISED),
    request(tokens_of(4 * CHUNK + 5, 4), 7),
    request(tokens_of(2, 5), 10, seed=4, temperature=1.5, top_p=0.8, top_k=20, min_p=0.01),
    request(tokens_of(2 * CHUNK, 6), 4, repetition_penalty=1.5),
    request(tokens_of(3, 7), 1),
    *(request(tokens_of(5 * CHUNK + 3 * i, 8 + i), 6) for i in range(2)),
]


@pytest.fixture
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether every engine begins a frame before it has finished the previous one, as on a busy GPU."""
    monkeypatch.setattr(Executor, "runs_ahead", request.param)
    return bool(request.param)


def cases(*families: str, chosen: set[tuple[str, bool, tuple[int, ...]]]) -> pytest.MarkDecorator:
    """Every family, mode and split; those that are not chosen run under the mark `matrix`."""
    return pytest.mark.parametrize(
        ("family", "runs_ahead", "layers"),
        [
            pytest.param(
                *case,
                id=f"{case[0]}-{'ahead' if case[1] else 'in step'}-{'+'.join(map(str, case[2]))}",
                marks=() if case in chosen else pytest.mark.matrix,
            )
            for case in product(families, (False, True), SPLITS)
        ],
        indirect=["runs_ahead"],
    )


in_step = cases("qwen3", chosen={("qwen3", False, (1, 3))})
ahead = cases("qwen3", chosen={("qwen3", True, (1, 2, 1))})


async def assert_as_alone(chain: Chain, requests: Sequence[Request]) -> None:
    alone, found = await solo(chain, requests), await together(chain, requests)
    assert [(each.tokens, each.finish_reason) for each in found] == [
        (each.tokens, each.finish_reason) for each in alone
    ]


@pytest.mark.usefixtures("two_lanes")
@cases(
    *FAMILIES,
    chosen={
        ("qwen3", False, (4,)), ("llama", True, (4,)), ("gemma3_text", False, (1, 2, 1)), ("qwen3_5", True, (1, 3)),
        ("qwen3_moe", False, (1, 3)),
    },
)  # fmt: skip
async def test_requests_side_by_side_get_the_tokens_that_each_gets_alone(
    models: Models, passes: list[Pass], runs_ahead: bool, family: str, layers: Layers
) -> None:
    whole = models(family)
    async with running(whole.folder, layers) as chain:
        found, alone = await together(chain, MIXED), whole.tokens_of(MIXED)
    assert [(each.tokens, each.finish_reason) for each in found] == [(tokens, "length") for tokens in alone]
    assert max(len(each.rows) for each in passes) > 1, "no two windows ever shared a pass"
    assert len({tuple(tokens) for tokens in alone}) == len(MIXED)


@pytest.mark.usefixtures("two_lanes")
@ahead
async def test_every_decoder_sampling_and_chunking_side_by_side_changes_no_token(
    models: Models, passes: list[Pass], runs_ahead: bool, family: str, layers: Layers
) -> None:
    bias = dict(BIASED.logit_bias)
    requests = [
        request(tokens_of(11, 1), 14),
        request(tokens_of(3, 2), 14, Decode("diffusion", 8), logit_bias=bias),
        request(tokens_of(40, 3), 14, Decode("diffusion", 16), seed=1, temperature=1.0),
        request(tokens_of(6, 4) * 5, 14, Decode("ngram"), logit_bias=bias),
        request(tokens_of(2, 5), 14, Decode("diffusion-fast", 4, 1.0)),
        request(tokens_of(19, 6), 14, Decode("diffusion-fast", 16, 2.0), seed=2, temperature=0.7),
        request(tokens_of(25, 7), 14, Decode("ngram"), **PENALISED, logit_bias=bias),
        request(tokens_of(9, 8), 14, Decode("diffusion", 4), **PENALISED, logit_bias=bias),
    ]
    folder = models(family, **MASKED).folder
    async with running(folder, layers) as chain:
        await assert_as_alone(chain, requests)
    assert any(len(set(each.rows)) >= 3 for each in passes), "windows of one length alone prove less"


@pytest.mark.usefixtures("two_lanes")
@in_step
async def test_full_rotating_and_quantised_caches_share_a_lane(
    models: Models, passes: list[Pass], runs_ahead: bool, family: str, layers: Layers
) -> None:
    caches = [make_cache_choice("full"), make_cache_choice("rotating", 14), make_cache_choice("int8")]
    caches.append(make_cache_choice("int4"))
    decodes = [Decode(), Decode("diffusion", 4), Decode("ngram")]
    requests = [
        request(tokens_of(20 + 5 * i + j, i + 3 * j), 10, decode, cache=cache)
        for i, cache in enumerate(caches)
        for j, decode in enumerate(decodes)
    ]
    folder = models(family, **WIDE).folder
    async with running(folder, layers) as chain:
        await assert_as_alone(chain, requests)
    assert max(len(each.rows) for each in passes) > 1


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.matrix), "qwen3_5"])
async def test_logprobs_side_by_side_are_close_to_those_alone(models: Models, family: str) -> None:
    requests = [request(tokens_of(4 + 7 * i, i), 6, logprobs=4, seed=i, temperature=0.7 * i) for i in range(4)]
    async with running(models(family).folder, (1, 3)) as chain:
        alone = await solo(chain, requests)
        found = await together(chain, requests)
    for one, other in zip(found, alone, strict=True):
        assert_same_samples(one, other, family)
        assert all(len(sample.alternatives) >= 3 for sample in one.samples)


@cases(
    "qwen3", "gemma3_text", "qwen3_5",
    chosen={
        ("qwen3", True, (4,)), ("gemma3_text", True, (1, 2, 1)), ("qwen3_5", False, (1, 3)),
    },
)  # fmt: skip
async def test_requests_that_join_and_leave_between_steps_change_no_token(
    models: Models, runs_ahead: bool, family: str, layers: Layers
) -> None:
    """Each joins when the one before it has its second token, and leaves whenever it is done."""
    requests = [request(tokens_of(1 + (9 * i) % 31, i), 4 + (5 * i) % 11, seed=i, temperature=i % 2) for i in range(7)]
    whole = models(family)
    async with running(whole.folder, layers) as chain, Engine(chain) as engine:
        found = [await each.answer() for each in await staggered(engine, requests)]
    assert [each.tokens for each in found] == whole.tokens_of(requests)
    assert all(later.usage.started > earlier.token_times[1] for earlier, later in pairwise(found))


async def staggered(engine: Engine, requests: Sequence[Request]) -> list[Live]:
    live: list[Live] = []
    for each in requests:
        if live:
            await live[-1].wait_pieces(2)
        live.append(Live(engine, each))
    return live


@pytest.mark.parametrize("layers", [(4,), (1, 2, 1)], ids=str)
@pytest.mark.usefixtures("nothing_ahead")
async def test_windows_of_a_lane_share_one_pass_on_every_stage(
    folder: Path, passes: list[Pass], layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 streams of 14 tokens take about 14 passes per lane, where one by one they would take 168."""
    count, num_tokens, num_lanes = 12, 14, len(layers)
    monkeypatch.setattr(LaneChooser, "choose", lambda self, num_sessions, rows_each: num_lanes)
    requests = [request(tokens_of(1, i), num_tokens) for i in range(count)]
    async with running(folder, layers) as chain:
        passes.clear()
        await together(chain, requests)
    for start in (0, layers[0])[: len(layers)]:
        here = [each for each in passes if each.start == start]
        assert sum(sum(each.rows) for each in here) == count * num_tokens
        assert sum(len(each.rows) == count // num_lanes for each in here) >= num_lanes * (num_tokens - 3)
        assert len(here) <= num_lanes * (num_tokens + 3)


@pytest.mark.usefixtures("nothing_ahead")
async def test_an_answer_takes_its_own_windows_and_no_other_row(folder: Path, passes: list[Pass]) -> None:
    """Nothing is padded: a lane's rows are those of its windows."""
    async with running(folder, (1, 3)) as chain:
        passes.clear()
        found = await together(chain, MIXED)
        rows = sum(len(each.prompt) + len(answer.tokens) - 1 for each, answer in zip(MIXED, found, strict=True))
        for start in (0, 1):
            assert sum(sum(each.rows) for each in passes if each.start == start) == rows
        alone = await solo(chain, MIXED)
    assert [len(each.passages) for each in found] == [len(each.passages) for each in alone]
    assert [each.usage.num_steps for each in found] == [len(each.tokens) for each in found]


async def test_a_step_that_fails_before_another_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that run ahead have two frames on the device: no request may wait for ever for the lost one."""
    begin, begun = Executor.begin, []

    def fail(engine: Executor, frame: Any, *rest: Any) -> Any:
        begun.append(frame.step)
        if len(begun) == 25:
            raise RuntimeError("no such kernel")
        return begin(engine, frame, *rest)

    monkeypatch.setattr(Executor, "runs_ahead", True)
    async with running(folder, (4,)) as chain:
        monkeypatch.setattr(Executor, "begin", fail)
        async with Engine(chain) as engine, asyncio.timeout(10):
            outcomes = await asyncio.gather(
                *(engine.answer(request(tokens_of(3, i), 40), chunk=CHUNK) for i in range(4)), return_exceptions=True
            )
    assert [type(outcome) for outcome in outcomes] == [InternalError] * 4
    assert all("RuntimeError('no such kernel') at test_lanes.py" in str(outcome) for outcome in outcomes)
