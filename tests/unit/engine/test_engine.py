"""The engine over lost chains, in virtual time: which requests go on, wait, or end."""

import asyncio
import gc
import threading
import types
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import tests.unit.cluster.fake_network as network
from coordinator.cluster.recovery_record import Recovery
from coordinator.decoding.decode_options import Decode
from coordinator.decoding.decoders import Proposal, Verified
from coordinator.engine.core import EngineCore
from coordinator.engine.engine import Engine, ServerState
from coordinator.engine.quarantine import MOST_LOSSES
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Node, assign, split_by_bytes
from coordinator.sessions.cache_costs import cache_costs
from coordinator.sessions.request import Request
from coordinator.sessions.session import MOST_UNREAD, Session, SessionState
from coordinator.sessions.text import TextParser
from protos.brigade_pb2 import Cache
from tests.unit.engine.test_channels import Pieces
from tests.unit.fake_chain import plain_answer
from tests.unit.virtual_time import VirtualTime
from worker.errors import (
    BrigadeError,
    InternalError,
    NodeBusy,
    NodeLeaving,
    NodeReturned,
    PoisonRequest,
    ReaderLost,
    StageLost,
    WaitedTooLong,
)
from worker.platform.tasks import cancel_all
from worker.platform.threads import MlxThread

SPEC = replace(network.SPEC, context=4000)
WIDE, STEP_S = 60_000, 0.2


class Chains:
    """One chain after another, each with so much memory per node; a loss opens the next."""

    def __init__(self, *memory: int) -> None:
        self._own = network.FakeOwn(network.World("a"))
        self._memory = list(memory)
        self._epoch = 0

    def open(self) -> Any:
        self._epoch += 1
        memory = self._memory.pop(0) if len(self._memory) > 1 else self._memory[0]
        nodes = [Node("coordinator", memory), Node("a", memory)]
        plan = assign(SPEC, nodes, split_by_bytes(SPEC, nodes, 1, 1), 1, 1)
        deployment: Any = types.SimpleNamespace(plan=plan, spec=SPEC, peers=[])
        chain: Any = network.WorldChain(self._own, deployment, self._epoch)
        chain.num_stages, chain.clock_offsets, chain.answers_alone = 2, [0, 0], False
        chain.prefixes = None
        chain.costs = chain.answer_costs = ChainCosts(2)
        return chain

    async def reopen(self, error: BrigadeError) -> Any:
        await asyncio.sleep(STEP_S)
        return self.open()


@pytest.fixture
def clock(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    monkeypatch.setattr(network, "STEP_S", STEP_S)
    return virtual


def run(clock: VirtualTime, chains: Chains, work: Callable[[Engine], Awaitable[None]], **more: Any) -> None:
    async def with_engine() -> None:
        async with asyncio.timeout(10_000), Engine(chains.open(), when_lost=chains.reopen, **more) as engine:
            await work(engine)

    clock.run(with_engine())


def asked(engine: Engine, *requests: Request) -> "list[asyncio.Task[list[int]]]":
    async def tokens(request: Request) -> list[int]:
        return (await engine.answer(request)).tokens

    return [asyncio.create_task(tokens(request)) for request in requests]


def expected(request: Request) -> list[int]:
    return plain_answer(request.prompt, request.max_tokens)


async def lose(engine: Engine, error: BrigadeError) -> None:
    """End the present chain, and return once there is another one."""
    before: Any = engine.chain
    before.lose(error)
    while engine.chain is before:  # noqa: ASYNC110 - in virtual time
        await asyncio.sleep(STEP_S)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(InternalError("internal error: RuntimeError('bad'); this is a bug", node="a"), InternalError),
     (StageLost("closed", node="a"), PoisonRequest)],
    ids=["bug", "lost"],
)  # fmt: skip
def test_requests_that_end_engines_end_alone(clock: VirtualTime, loss: BrigadeError, kind: type[BrigadeError]) -> None:
    poison, sound = Request((7,) * 3000, 5), Request((4, 5), 30)

    async def work(engine: Engine) -> None:
        [bad] = asked(engine, poison)
        for _ in range(MOST_LOSSES + 1):
            await asyncio.sleep(STEP_S / 2)
            await lose(engine, loss)
        with pytest.raises(kind, match="given up: the chain was lost 3 times"):
            await bad
        [good] = asked(engine, sound)
        assert await good == expected(sound)

    run(clock, Chains(WIDE), work)


def test_an_engine_that_drains_finishes_its_answers_and_takes_no_new_request(clock: VirtualTime) -> None:
    running, late = Request((1, 2, 3), 30), Request((4, 5), 5)

    async def work(engine: Engine) -> None:
        [task] = asked(engine, running)
        await asyncio.sleep(STEP_S)
        draining = asyncio.create_task(engine.drain(100.0))
        await asyncio.sleep(0)
        [refused] = asked(engine, late)
        with pytest.raises(NodeBusy):
            await refused
        assert await draining and await task == expected(running)

    run(clock, Chains(WIDE), work)


def test_handovers_of_drained_workers_are_no_losses_of_a_request(clock: VirtualTime) -> None:
    request = Request(tuple(i % 40 for i in range(2000)), 5)

    async def work(engine: Engine) -> None:
        [task] = asked(engine, request)
        for _ in range(2 * MOST_LOSSES):
            await asyncio.sleep(STEP_S / 2)
            await lose(engine, NodeLeaving("is about to end", node="a"))
        assert await task == expected(request)

    run(clock, Chains(WIDE), work)


def test_a_suspect_whose_turn_comes_is_entered_once(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose turn it is does not fit on the nodes that are left."""
    requests = [Request((1, 2, 3), 5), Request(tuple(range(40)) * 40, 60), Request((4, 5), 5), Request((6, 7, 8, 9), 5)]
    entered: list[tuple[int, int]] = []
    enter = EngineCore.enter

    def note(core: EngineCore, session: Any, **more: bool) -> None:
        assert session not in core.scheduler.slots, "entered twice"
        entered.append((id(core.scheduler), session.num_prompt))
        enter(core, session, **more)

    monkeypatch.setattr(EngineCore, "enter", note)

    async def work(engine: Engine) -> None:
        tasks = asked(engine, *requests)
        for _ in range(3):
            await asyncio.sleep(STEP_S / 10)
            await lose(engine, StageLost("lost", node="a"))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert isinstance(outcome, StageLost) or outcome == expected(request)
        assert engine.failure is None and len(set(entered)) == len(entered)

    run(clock, Chains(WIDE, WIDE, WIDE, 2600), work)


def test_an_answer_that_has_begun_waits_for_memory_without_a_deadline(clock: VirtualTime) -> None:
    requests = [Request((number, 2, 3), 1000) for number in range(2)]

    async def work(engine: Engine) -> None:
        tasks = asked(engine, *requests)
        await asyncio.sleep(100 * STEP_S)
        await lose(engine, StageLost("lost", node="a"))
        await asyncio.sleep(70)
        states = sorted(session.state.value for session in engine.sessions)
        assert SessionState.REPLAYING.value in states and not any(task.done() for task in tasks)
        assert [await task for task in tasks] == [expected(request) for request in requests]

    run(clock, Chains(WIDE, 5000), work, max_wait_s=60.0)


@pytest.mark.parametrize("max_wait_s", [60.0, STEP_S / 2], ids=["before", "after it would have passed"])
def test_who_loses_its_memory_before_it_begins_has_a_deadline_too(clock: VirtualTime, max_wait_s: float) -> None:
    """One of the background had memory at once; what comes next is more urgent, and needs all."""

    async def work(engine: Engine) -> None:
        stream, early = asked(engine, Request((1,) * 20, 3000), Request((2,) * 300, 5, priority=5))
        await asyncio.sleep(STEP_S)
        urgent = Request((3,) * (engine.context - 1100), 700)
        others = asked(engine, urgent, Request((4,) * 1200, 5, priority=5))
        for waiting in (early, others[1]):
            with pytest.raises(WaitedTooLong):
                async with asyncio.timeout(130):
                    await waiting
        await cancel_all(stream, *others)

    run(clock, Chains(9000), work, max_wait_s=max_wait_s)


def test_a_call_of_which_an_answer_has_begun_waits_for_memory_without_a_deadline(clock: VirtualTime) -> None:
    """There is memory for one prompt at a time, and each answer takes less time than a call may wait."""
    small = Chains(2600).open()
    prompt = (7,) * (cache_costs(small.plan, small.spec).most_rows(Cache(), SPEC.context) * 2 // 3)
    twice, other = [Request(prompt, 80)] * 2, Request((8, *prompt), 80)

    async def call(engine: Engine, requests: Sequence[Request]) -> list[int]:
        tokens = defaultdict[int, list[int]](list)
        async for number, output in engine.generate_all(requests):
            tokens[number] += [token.token for token in output.tokens]
        return [len(each) for each in tokens.values()]

    async def work(engine: Engine) -> None:
        calls = [asyncio.create_task(call(engine, requests)) for requests in (twice, [other], twice)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert found[:2] == [[80, 80], [80]] and isinstance(found[2], WaitedTooLong)

    run(clock, Chains(2600), work, max_wait_s=30.0)


def test_the_wait_for_a_chain_is_none_for_memory(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for one prompt at a time; one request comes before the chain is lost, and one after that."""
    chains = Chains(2600)

    async def reopen(error: BrigadeError) -> Any:
        await asyncio.sleep(100)
        return chains.open()

    monkeypatch.setattr(chains, "reopen", reopen)
    small = Chains(2600).open()
    prompt = (7,) * (cache_costs(small.plan, small.spec).most_rows(Cache(), SPEC.context) * 2 // 3)
    requests = [Request((number, *prompt), 80) for number in range(3)]

    async def work(engine: Engine) -> None:
        chain: Any = engine.chain
        tasks = asked(engine, *requests[:2])
        await asyncio.sleep(3 * STEP_S)
        chain.lose(StageLost("lost", node="a"))
        await asyncio.sleep(STEP_S)
        tasks += asked(engine, requests[2])
        assert [await task for task in tasks] == [expected(request) for request in requests]

    run(clock, chains, work, max_wait_s=60.0)


@pytest.mark.parametrize("room", [100, 3], ids=["for more than it has", "for less than it has"])
def test_an_answer_that_no_longer_fits_ends_with_what_memory_holds_and_length(clock: VirtualTime, room: int) -> None:
    """The first chain has memory for all of it, the next one for the prompt and `room` tokens."""
    small = Chains(2600).open()
    rows = cache_costs(small.plan, small.spec).most_rows(Cache(), SPEC.context)
    request = Request(tuple(number % 40 for number in range(rows - room)), 1000)

    async def work(engine: Engine) -> None:
        [task] = [asyncio.create_task(engine.answer(request))]
        while not any(session.num_generated >= 8 for session in engine.sessions):  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(STEP_S)
        [session] = engine.sessions
        known = session.num_generated
        await lose(engine, StageLost("lost", node="a"))
        answer = await task
        assert (answer.finish_reason, len(answer.tokens)) == ("length", max(known, room))
        assert answer.tokens == expected(request)[: len(answer.tokens)]
        assert answer.usage.num_generated == len(answer.tokens) and not engine.sessions
        cut = await engine.answer(Request((1, 2, 3), 100_000))  # on the small one from the beginning
        assert 3 < len(cut.tokens) < 4000 and cut.finish_reason == "length"

    run(clock, Chains(WIDE, 2600), work)


@pytest.mark.parametrize("error", [StageLost("gone"), ZeroDivisionError("a bug")], ids=["a failure", "a bug"])
def test_whatever_ends_one_answer_is_raised_and_ends_the_others(clock: VirtualTime, error: Exception) -> None:
    requests = [Request((number, 2, 3), 1000) for number in range(3)]

    async def work(engine: Engine) -> None:
        with pytest.raises(type(error)):
            async for number, _ in engine.generate_all(requests):
                if number == 1:
                    failing = next(each for each in engine.sessions if each.request is requests[2])
                    engine.core.fail(failing, error)
        await asyncio.sleep(STEP_S)
        assert not engine.sessions

    run(clock, Chains(WIDE), work)


def test_answers_of_one_call_share_a_queue_and_begin_after_the_first_of_their_prompt(clock: VirtualTime) -> None:
    requests = [Request((1, 2, 3), 4), Request((1, 2, 3), 6), Request((5,), 3)]
    begun: list[int] = []

    async def work(engine: Engine) -> None:
        found: dict[int, list[int]] = {number: [] for number in range(3)}
        async for number, output in engine.generate_all(requests):
            begun.append(number)
            found[number] += [token.token for token in output.tokens]
        assert list(found.values()) == [expected(request) for request in requests]
        assert begun.index(0) < begun.index(1)

    run(clock, Chains(WIDE), work)


def test_answers_of_one_call_are_so_many_at_once_and_all_come_though_the_engine_drains(clock: VirtualTime) -> None:
    requests = [Request((number // 4, 2, 3), 4) for number in range(12)]  # each prompt four times

    async def work(engine: Engine) -> None:
        found = defaultdict[int, list[int]](list)
        draining: list[asyncio.Task[bool]] = []
        async for number, output in engine.generate_all(requests, at_once=2):
            draining = draining or [asyncio.create_task(engine.drain(100.0))]
            assert len(engine.sessions) <= 2
            found[number] += [token.token for token in output.tokens]
        assert dict(found) == {number: expected(request) for number, request in enumerate(requests)}
        assert list(found)[8] == 8 and await draining[0], "a prompt waits for those of earlier ones, which are kept"

    run(clock, Chains(WIDE), work)


def test_a_reader_that_catches_up_at_a_pause_is_seen(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a prompt chunk puts no output, so the reader would not look again and never see the pause."""
    asked = Request((1, 2, 3) * 8, 5)

    class CatchesUp(Session):
        """A session whose reader is far behind the first time that the engine asks, and never again."""

        was_behind = False

        @property
        def num_unread(self) -> int:
            self.was_behind, before = True, self.was_behind
            return super().num_unread if before else MOST_UNREAD

    monkeypatch.setattr("coordinator.engine.core.Session", CatchesUp)

    async def work(engine: Engine) -> None:
        begun = clock.now
        assert (await engine.answer(asked, chunk=2)).tokens == expected(asked)
        assert clock.now - begun < 30, "the session stood still until its reader was given up"

    run(clock, Chains(WIDE), work)


def test_a_reader_is_given_up_once_it_has_read_nothing_for_a_while(
    clock: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "STEP_S", 0.01)

    async def work(engine: Engine) -> None:
        num_read = 0
        async for output in engine.generate(Request((1, 2, 3), 400)):
            num_read += len(output.tokens)
            await asyncio.sleep(0.25)  # so that half of the outputs which may be unread take 32 s
        assert num_read == 400
        with pytest.raises(ReaderLost):
            async for output in engine.generate(Request((1, 2, 3), 400)):
                await asyncio.sleep(0 if output.num_steps > 1 else 40)
        with pytest.raises(ReaderLost):  # also one that has read a little after the pause
            async for output in engine.generate(Request((1, 2, 3), 400)):
                await asyncio.sleep({1: 20, 2: 70}.get(output.num_steps, 0))

    run(clock, Chains(WIDE), work)


def test_an_answer_that_ends_by_a_stop_string_ends_no_other_though_steps_of_it_are_under_way(
    clock: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, other = Request((1, 2, 3), 40), Request((4, 5, 6), 40)
    stop, words = f"<{expected(stopped)[2]:02}>", "".join(f"<{token:02}>" for token in range(SPEC.vocab_size))
    monkeypatch.setattr(Engine, "parser", lambda self, request: TextParser(Pieces(words, 4), request.stops))

    async def work(engine: Engine) -> None:
        found: dict[int, list[int]] = {0: [], 1: []}
        async for number, output in engine.generate_all([replace(stopped, stops=(stop,)), other]):
            found[number] += [token.token for token in output.tokens]
            await asyncio.sleep(5 * STEP_S)  # meanwhile more outputs come
        assert found == {0: expected(stopped)[:3], 1: expected(other)} and not engine.sessions

    run(clock, Chains(WIDE), work)


def test_a_session_chooses_by_the_costs_of_its_new_chain(clock: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[ChainCosts] = []

    class Noting(Verified):
        def __init__(self, costs: ChainCosts) -> None:
            super().__init__()
            self._costs = costs

        def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
            used.append(self._costs)
            return super().propose(tokens, num_unfed, room, num_together)

    monkeypatch.setattr(Decode, "make_decoder", lambda decode, eos, costs, *_, **__: Noting(costs))
    request = Request((4, 5), 30)

    async def work(engine: Engine) -> None:
        [task], chains = asked(engine, request), [engine.chain]
        while len(used) < 5:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(STEP_S)
        await lose(engine, StageLost("closed", node="a"))
        chains.append(engine.chain)
        assert await task == expected(request)
        assert list(dict.fromkeys(map(id, used))) == [id(chain.costs) for chain in chains]

    run(clock, Chains(WIDE), work)


def test_a_request_sent_without_a_chain_is_answered_by_the_next_one(clock: VirtualTime) -> None:
    first, second = Request((4, 5), 30), Request((6, 7, 8), 30)

    async def work(engine: Engine) -> None:
        before: Any = engine.chain
        [running] = asked(engine, first)
        await asyncio.sleep(2 * STEP_S)
        before.lose(StageLost("closed", node="a"))
        await asyncio.sleep(STEP_S / 2)
        assert engine.chain is before
        [late] = asked(engine, second)
        assert (await running, await late) == (expected(first), expected(second))
        assert engine.chain is not before

    run(clock, Chains(WIDE), work)


def test_no_chain_is_opened_behind_an_engine_that_is_left(clock: VirtualTime) -> None:
    """It is left so many turns of the loop after its chain was lost."""
    num_begun = 0

    async def leave_after(num_turns: int) -> None:
        nonlocal num_begun
        opening = list[str]()

        async def reopen(error: BrigadeError) -> Any:
            opening.append("begun")
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(STEP_S)
                opening.append("ended")

        async with Engine(Chains(WIDE).open(), when_lost=reopen) as engine:
            await asyncio.sleep(STEP_S)
            chain: Any = engine.chain
            chain.lose(StageLost("closed", node="a"))
            for _ in range(num_turns):
                await asyncio.sleep(0)
        found = list(opening)
        await asyncio.sleep(STEP_S)
        assert found == opening and found in ([], ["begun", "ended"])
        num_begun += bool(found)

    for num_turns in range(30):
        clock.run(leave_after(num_turns))
    assert num_begun


@pytest.mark.parametrize(
    ("error", "prompt_end", "state"),
    [
        (StageLost("closed", node="a"), None, ServerState.RECOVERING),
        (StageLost("closed", node="a"), 1, ServerState.DEGRADED),
        (NodeReturned("back", node="a"), None, ServerState.DEGRADED),
    ],
)
def test_without_a_chain_the_engine_is_recovering_unless_there_is_one_at_once(
    clock: VirtualTime, error: BrigadeError, prompt_end: int | None, state: ServerState
) -> None:
    plan: Any = types.SimpleNamespace(prompt_end=prompt_end)
    recovery = Recovery(plan)
    recovery.begin(error, None)
    cluster = types.SimpleNamespace(trouble=str(error), recovery=recovery, missing=[], waiting="")

    async def look(engine: Engine) -> None:
        await asyncio.sleep(STEP_S)
        assert engine.status.state is state

    run(clock, Chains(WIDE), look, cluster=cluster)


async def test_a_request_that_comes_as_the_engine_fails_gets_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is entered on the MLX thread between the end of the engine's loop there and the news of it here."""
    thread, chain = MlxThread(), Chains(WIDE).open()
    chain.thread = thread
    is_over, is_entering, is_known = threading.Event(), threading.Event(), threading.Event()

    async def wait_over() -> None:
        chain.lose(StageLost("lost", node="a"))
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        is_over.set()

    def draining(chain: Any) -> None:
        is_entering.set()
        assert is_known.wait(5)

    async with Engine(chain) as engine:
        await thread.call(asyncio.sleep(0))
        monkeypatch.setattr(network.WorldChain, "draining", property(draining))
        over = asyncio.create_task(thread.call(wait_over()))
        await asyncio.sleep(0)
        assert is_over.wait(5)
        [late] = asked(engine, Request((4, 5), 5))
        await asyncio.sleep(0)
        assert is_entering.wait(5) and engine.failure is None
        while engine.failure is None:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        is_known.set()
        with pytest.raises(StageLost, match="lost"):
            async with asyncio.timeout(5):
                await late
        await over
    thread.close()


async def test_no_chain_is_opened_for_an_engine_that_was_left_while_its_thread_was_held_up() -> None:
    thread, chain = MlxThread(), Chains(WIDE).open()
    chain.thread = thread
    is_losing, leave, opening = threading.Event(), threading.Event(), list[BrigadeError]()
    logged: list[dict[str, Any]] = []
    thread.loop.set_exception_handler(lambda _, context: logged.append(context))

    class Peers(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            is_losing.set()
            assert leave.wait(10)
            return super().__iter__()

    async def reopen(error: BrigadeError) -> Any:
        opening.append(error)
        raise error

    async def lose(chain: Any) -> None:
        chain.peers = Peers()
        chain.lose(StageLost("lost", node="a"))

    with pytest.raises(ZeroDivisionError):
        async with Engine(chain, when_lost=reopen):
            await thread.call(lose(chain))
            await asyncio.to_thread(is_losing.wait, 5)
            raise ZeroDivisionError
    leave.set()
    for _ in range(5):
        await thread.call(asyncio.sleep(0))
    del chain  # and with its error the frames that it passed through
    await thread.run(gc.collect)
    assert not opening and not logged
    thread.loop.set_exception_handler(None)
    thread.close()
