"""What breaks inside a worker: it hangs, keeps silent, makes NaN, runs out of memory, dies of a token, loads slowly."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial

from coordinator.planning.recovery import Limits
from coordinator.sessions.output import Answer
from tools.faults.asked import asking_four, four
from tools.faults.case import COMES_BACK, IS_GONE, Case, num_pieces
from tools.faults.rig import NAMES, Rig
from tools.faults.trial import Seen
from tools.worker_process import WorkerProcess
from worker.errors import FrameError, StageLost
from worker.platform.tasks import background

HUNG_S = 10.0  # a worker that answers, but brings no results
_STEP = 24  # of a chain: after the warm-up, the prompts and some tokens
_POISON = 1999  # a token that no answer of the bundled model contains


def inside() -> Iterator[Case]:
    hung = f"noticed within {HUNG_S:g} s, every stream equal"
    for name, failpoint, done in (
        ("first", "loop", "its event loop never returns"),
        ("last", "engine", "its engine never returns"),
        ("first", "mute", "it hands nothing on"),
        ("last", "mute", "it answers nothing"),
    ):
        run = partial(hang, name=name, failpoint=f"{failpoint}@{_STEP}")
        yield Case("inside", f"{name}: {done}", hung, run)
    for name in NAMES:
        run = partial(hang, name=name, failpoint=f"memory@{_STEP}")
        yield Case("inside", f"{name} has no memory for a step", "every stream equal", run)
        run = partial(nan, name=name)
        yield Case(
            "inside", f"--check-finite: {name} makes NaN of one request", "it fails by name, the others equal", run
        )
        yield Case(
            "inside", f"a token that kills {name} whenever it is fed", "the request fails, the others equal",
            partial(poison, name=name),
        )  # fmt: skip
    run = partial(lose_first, limits=COMES_BACK, failpoint="load@3", num_stages=3)
    yield Case("inside", "first is killed, and its next load takes 3 s longer", "awaited, equal", run)
    run = partial(lose_first, limits=Limits(rejoin_s=3, recovery_s=60), failpoint="join", num_stages=2)
    yield Case("inside", "first is killed, and from then on whenever it joins a chain", "planned around, equal", run)


async def hang(rig: Rig, name: str, failpoint: str) -> Seen:
    async with asking_four(rig, IS_GONE, failpoints={name: failpoint}) as (trial, asked, expected):
        await trial.begin(asked, -1, lambda: None)
        found = await trial.answers()
        also = str(trial.errors[0]) if trial.errors else ""
        return trial.seen(found, expected, is_kept=trial.is_noticed_within(HUNG_S), also=also)


async def nan(rig: Rig, name: str) -> Seen:
    await rig.make_whole(**{name: f"nan@token={_POISON}"})
    asked = four(rig, "ar")
    expected = await rig.expected(asked)
    spoiled = replace(asked[0], prompt=(*asked[0].prompt[:-1], _POISON))
    async with rig.opened(rig.options(COMES_BACK, check_finite=True)) as trial:
        await trial.begin([spoiled, *asked], -1, lambda: None)
        failed, *found = await trial.outcomes()
        is_named = isinstance(failed, FrameError) and f"worker {name}: " in str(failed) and "not finite" in str(failed)
        return trial.seen(_whole(found), expected, is_kept=is_named and not trial.lost_at, also=str(failed))


async def poison(rig: Rig, name: str) -> Seen:
    failpoint = f"crash@token={_POISON}"
    await rig.make_whole(**{name: failpoint})
    asked = four(rig, "ar")
    expected = await rig.expected(asked)
    poisonous = replace(asked[0], prompt=(*asked[0].prompt[:-1], _POISON))
    async with rig.opened(rig.options(COMES_BACK)) as trial, started_again(rig.nodes[name], failpoint):
        await trial.begin([poisonous, *asked], -1, lambda: None)
        failed, *found = await trial.outcomes()
        is_given_up = isinstance(failed, StageLost) and "given up" in str(failed)
        next_one = await trial.engine.answer(asked[0], parser=rig.tokenizer.stream(()))
        is_kept = is_given_up and next_one.tokens == expected[0].tokens
        return trial.seen(_whole(found), expected, is_kept=is_kept, also=str(failed))


async def lose_first(rig: Rig, limits: Limits, failpoint: str, num_stages: int) -> Seen:
    """It is started again with this failpoint, as often as it ends."""
    async with asking_four(rig, limits) as (trial, asked, expected):
        await trial.begin(asked, num_pieces(expected[0]) // 2, rig.first.kill)
        await trial.wait_lost()
        async with started_again(rig.first, failpoint):
            found = await trial.answers()
        return trial.seen(found, expected, is_kept=len(trial.layers) == num_stages)


@contextlib.asynccontextmanager
async def started_again(node: WorkerProcess, failpoint: str) -> AsyncIterator[None]:
    """Somebody starts it again whenever it ends, with this failpoint."""

    async def watch() -> None:
        while True:
            if not node.is_running:
                node.start(failpoint)
            await asyncio.sleep(0.05)

    async with background(watch()):
        yield


def _whole(found: list[Answer | BaseException]) -> list[Answer]:
    """All are answers. Raises what one failed with."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, Answer)]
