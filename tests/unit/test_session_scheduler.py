"""Sessions and the scheduler, driven against a chain that checks every frame the way a stage does."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from coordinator.scheduler import Scheduler
from coordinator.session import Session
from protos.brigade_pb2 import Frame, Result, Sample, Sampling
from worker.history import History

VOCAB = 50


def next_token(tokens: list[int]) -> int:
    """The model of these tests: every token matters, and so does its place."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1009
    return value % VOCAB


def plain_answer(prompt: list[int], max_tokens: int, eos: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeChain:
    """All stages at once: results come in the order of the frames. Refuses whatever a stage would, and more."""

    max_in_flight: int
    chunk: int
    epoch: int = 1
    slots: dict[int, History] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    results: deque[Result] = field(default_factory=deque)
    openings: list[tuple[int, int]] = field(default_factory=list)  # slot and seed

    def send(self, frame: Frame) -> None:
        assert frame.epoch == self.epoch
        assert frame.step == len(self.frames) + 1
        self.frames.append(Frame.FromString(frame.SerializeToString()))
        for slot in frame.closed:
            del self.slots[slot]  # KeyError: closed twice, or never opened
        for opening in frame.opened:
            assert opening.slot not in self.slots, "opened twice"
            self.slots[opening.slot] = History()
            self.openings.append((opening.slot, opening.sampling.seed))
        result = Result(epoch=frame.epoch, step=frame.step)
        for window in frame.windows:
            history = self.slots[window.slot]
            assert 1 <= len(window.tokens) <= self.chunk
            assert window.base <= len(history)
            assert window.prefix_hash == history.prefix_hash(window.base)
            history.cut(window.base)
            history.extend(window.tokens)
            assert window.wanted in (0, 1)
            if window.wanted:
                result.samples.append(Sample(slot=window.slot, token=next_token(history.tokens)))
        self.results.append(result)
        assert len(self.results) <= self.max_in_flight

    def receive(self) -> Result:
        return self.results.popleft()

    @property
    def windows(self) -> list[tuple[int, int, int, int]]:
        """Slot, base, length and wanted rows of every window so far."""
        return [(w.slot, w.base, len(w.tokens), w.wanted) for frame in self.frames for w in frame.windows]


class Rig:
    """A scheduler and its chain, stepped as the coordinator steps them."""

    def __init__(self, *, max_in_flight: int = 3, chunk: int = 4, epoch: int = 1) -> None:
        self.scheduler = Scheduler(max_in_flight, chunk, epoch)
        self.chain = FakeChain(max_in_flight, chunk, epoch)

    def open(
        self, prompt: list[int], max_tokens: int = 3, eos: frozenset[int] = frozenset(), *, seed: int = 0
    ) -> Session:
        session = Session(prompt, max_tokens, eos)
        self.scheduler.open(session, Sampling(seed=seed))
        return session

    def send_all(self) -> None:
        while (frame := self.scheduler.schedule()) is not None:
            self.chain.send(frame)

    def take_one(self) -> list[tuple[Session, Sample]]:
        return self.scheduler.commit(self.chain.receive())

    def step(self) -> list[tuple[Session, Sample]]:
        self.send_all()
        return self.take_one()

    def run(self, *sessions: Session) -> None:
        while any(session.finish_reason is None for session in sessions):
            self.step()

    def drain(self) -> None:
        self.send_all()
        while not self.scheduler.is_idle:
            self.step()
            self.send_all()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(f"{length} {seed}")
    return [numbers.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize(
    ("num_prompt", "chunk", "expected"),
    [
        (1, 4, [(0, 1, 1)]),
        (2, 4, [(0, 2, 1)]),
        (3, 4, [(0, 2, 0), (2, 1, 1)]),
        (4, 4, [(0, 4, 1)]),
        (5, 4, [(0, 4, 0), (4, 1, 1)]),
        (8, 4, [(0, 4, 0), (4, 4, 1)]),
        (9, 4, [(0, 4, 0), (4, 4, 0), (8, 1, 1)]),
        (3, 1, [(0, 1, 0), (1, 1, 0), (2, 1, 1)]),
    ],
)
def test_a_prompt_goes_in_chunks_and_only_its_last_row_is_wanted(
    num_prompt: int, chunk: int, expected: list[tuple[int, int, int]]
) -> None:
    rig = Rig(max_in_flight=10, chunk=chunk)
    rig.open(prompt_of(num_prompt))
    rig.send_all()
    assert rig.chain.windows == [(0, *window) for window in expected]


def test_each_token_after_the_prompt_goes_alone_and_is_wanted() -> None:
    rig = Rig()
    session = rig.open(prompt_of(5), max_tokens=4)
    rig.run(session)
    assert rig.chain.windows[2:] == [(0, 5, 1, 1), (0, 6, 1, 1), (0, 7, 1, 1)]
    assert [list(frame.windows[0].tokens) for frame in rig.chain.frames[2:]] == [[t] for t in session.generated[:3]]


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("max_in_flight", [1, 2, 5])
@pytest.mark.parametrize("num_prompt", [1, 4, 11])
def test_the_answer_is_that_of_the_model_whatever_the_chunks(num_prompt: int, max_in_flight: int, chunk: int) -> None:
    rig = Rig(max_in_flight=max_in_flight, chunk=chunk)
    prompt = prompt_of(num_prompt)
    session = rig.open(prompt, max_tokens=6)
    rig.run(session)
    assert session.generated == plain_answer(prompt, 6)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 8])
def test_a_long_prompt_fills_the_pipe_and_no_more(max_in_flight: int) -> None:
    rig = Rig(max_in_flight=max_in_flight, chunk=2)
    rig.open(prompt_of(100))
    rig.send_all()
    assert len(rig.chain.results) == max_in_flight
    rig.take_one()
    rig.send_all()
    assert len(rig.chain.results) == max_in_flight


def test_one_stream_cannot_have_two_tokens_in_flight() -> None:
    """The next token depends on the last one: with the prompt in, there is one frame at a time."""
    rig = Rig(max_in_flight=8)
    session = rig.open(prompt_of(2), max_tokens=5)
    while session.finish_reason is None:
        rig.send_all()
        assert len(rig.chain.results) == 1
        rig.take_one()


def test_two_sessions_take_turns() -> None:
    rig = Rig(max_in_flight=4, chunk=4)
    first, second = rig.open(prompt_of(2), 8), rig.open(prompt_of(4), 8)
    rig.run(first, second)
    slots = [slot for slot, *_ in rig.chain.windows]
    assert slots == [first.slot, second.slot] * 8


def test_a_long_prompt_stalls_another_stream_by_one_chunk_at_a_time() -> None:
    rig = Rig(max_in_flight=1, chunk=4)
    stream = rig.open(prompt_of(2), max_tokens=20)
    rig.step()
    rig.open(prompt_of(40), max_tokens=1)
    rig.run(stream)
    slots = [slot for slot, *_ in rig.chain.windows]
    during = slots[1:21]
    assert during == [1 - stream.slot, stream.slot] * 10 or during == [stream.slot, 1 - stream.slot] * 10


def test_a_session_that_waits_for_its_token_lets_others_go_first() -> None:
    rig = Rig(max_in_flight=4)
    waiting, other = rig.open(prompt_of(2)), rig.open(prompt_of(12))
    rig.send_all()
    assert [slot for slot, *_ in rig.chain.windows] == [waiting.slot] + [other.slot] * 3


@pytest.mark.parametrize(
    ("max_tokens", "eos_at", "reason", "num_generated"),
    [(5, None, "length", 5), (1, None, "length", 1), (5, 2, "stop", 3), (5, 0, "stop", 1), (3, 2, "stop", 3)],
)
def test_why_a_session_ends(max_tokens: int, eos_at: int | None, reason: str, num_generated: int) -> None:
    prompt = prompt_of(6, seed=4)
    plain = plain_answer(prompt, max_tokens)
    assert len(set(plain)) == len(plain), "choose a prompt whose answer has no repetition"
    eos = frozenset() if eos_at is None else frozenset({plain[eos_at], VOCAB + 1})
    rig = Rig()
    session = rig.open(prompt, max_tokens, eos)
    rig.run(session)
    assert session.finish_reason == reason
    assert session.generated == plain[:num_generated]


def test_an_end_of_sequence_token_in_the_prompt_ends_nothing() -> None:
    rig = Rig()
    prompt = [1, VOCAB + 1, 2]
    session = rig.open(prompt, 2, frozenset({VOCAB + 1}))
    rig.run(session)
    assert session.finish_reason == "length" and len(session.generated) == 2


def test_an_ended_session_sends_nothing_more() -> None:
    rig = Rig()
    session = rig.open(prompt_of(40))
    rig.step()
    session.stop()
    num_frames = len(rig.chain.frames)
    rig.send_all()
    assert len(rig.chain.frames) == num_frames
    assert session.finish_reason == "stop" and not session.is_ready


def test_a_slot_is_opened_by_the_first_frame_and_closed_by_the_one_after_the_end() -> None:
    rig = Rig()
    session = rig.open(prompt_of(2), max_tokens=2)
    rig.run(session)
    rig.scheduler.close(session)
    rig.drain()
    opened = [[opening.slot for opening in frame.opened] for frame in rig.chain.frames]
    closed = [list(frame.closed) for frame in rig.chain.frames]
    assert opened == [[0], [], []]
    assert closed == [[], [], [0]]
    assert not rig.chain.frames[-1].windows
    assert rig.chain.slots == {} and rig.scheduler.is_idle


def test_sampling_parameters_travel_once() -> None:
    rig = Rig()
    session = rig.open(prompt_of(9), max_tokens=4, seed=77)
    rig.run(session)
    assert rig.chain.openings == [(0, 77)]


def test_slots_are_used_again() -> None:
    rig = Rig()
    for round_ in range(5):
        sessions = [rig.open(prompt_of(3, seed=round_ * 2 + i)) for i in range(2)]
        assert {session.slot for session in sessions} == {0, 1}
        rig.run(*sessions)
        for session in sessions:
            rig.scheduler.close(session)


def test_a_slot_closed_and_taken_in_the_same_frame_is_empty_when_it_is_taken() -> None:
    rig = Rig()
    old = rig.open(prompt_of(6))
    rig.run(old)
    rig.scheduler.close(old)
    prompt = prompt_of(5)
    new = rig.open(prompt)
    rig.run(new)
    taken = next(frame for frame in rig.chain.frames if frame.closed)
    assert list(taken.closed) == [opening.slot for opening in taken.opened] == [new.slot]
    assert new.generated == plain_answer(prompt, 3)


def test_a_result_of_an_ended_session_does_not_reach_the_next_one_in_its_slot() -> None:
    rig = Rig(max_in_flight=2)
    old = rig.open(prompt_of(2), max_tokens=9)
    rig.send_all()  # its first token is on the way
    old.stop()
    rig.scheduler.close(old)
    prompt = prompt_of(3)
    new = rig.open(prompt)
    assert new.slot == old.slot
    rig.send_all()
    assert rig.chain.results[0].samples and rig.take_one() == []
    assert new.generated == old.generated == []
    rig.run(new)
    assert new.generated == plain_answer(prompt, 3)


def test_a_session_closed_before_its_first_frame_leaves_no_slot_behind() -> None:
    """A client may leave while its request waits for a turn: no stage has heard of its slot, or must keep it."""
    rig = Rig()
    session = rig.open(prompt_of(3))
    session.stop()
    rig.scheduler.close(session)
    rig.drain()
    assert rig.chain.slots == {}
    other = rig.open(prompt_of(3))
    rig.run(other)
    assert other.slot == 0 and rig.chain.openings[-1][0] == 0


def test_commits_name_the_session_and_its_token_and_chunks_yield_none() -> None:
    rig = Rig(max_in_flight=1, chunk=4)
    session = rig.open(prompt_of(8))
    assert rig.step() == []
    [(owner, sample)] = rig.step()
    assert owner is session
    assert [sample.token] == session.generated


def test_nothing_to_send_is_none() -> None:
    rig = Rig(epoch=3)
    assert rig.scheduler.schedule() is None and rig.scheduler.is_idle
    rig.open(prompt_of(1))
    rig.send_all()
    assert not rig.scheduler.is_idle
    assert {frame.epoch for frame in rig.chain.frames} == {3}


@pytest.mark.parametrize("seed", range(12))
def test_sessions_that_come_and_go_at_any_time_get_the_answers_they_would_get_alone(seed: int) -> None:
    numbers = random.Random(seed)
    rig = Rig(max_in_flight=numbers.randint(1, 5), chunk=numbers.randint(1, 6))
    alive: dict[int, tuple[Session, list[int]]] = {}
    most_alive = num_opened = 0
    for _ in range(250):
        choice = numbers.random()
        if choice < 0.1 and len(alive) < 4:
            prompt = prompt_of(numbers.randint(1, 20), seed=num_opened)
            session = rig.open(prompt, numbers.randint(1, 8), frozenset({numbers.randrange(VOCAB)}))
            num_opened += 1
            alive[id(session)] = session, prompt
            most_alive = max(most_alive, len(alive))
            assert session.slot < most_alive
        elif choice < 0.13 and alive:
            numbers.choice(list(alive.values()))[0].stop()
        elif choice < 0.6:
            if (frame := rig.scheduler.schedule()) is not None:
                rig.chain.send(frame)
        elif rig.chain.results:
            rig.take_one()
        for key, (session, prompt) in list(alive.items()):
            assert session.generated == plain_answer(prompt, len(session.generated))
            if session.finish_reason is not None:
                rig.scheduler.close(session)
                del alive[key]
    for session, _ in alive.values():
        session.stop()
        rig.scheduler.close(session)
    rig.drain()
    assert rig.chain.slots == {} and num_opened
