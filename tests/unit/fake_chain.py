"""A chain that checks every frame the way a stage does, a model of a few lines, and a scheduler that drives both."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from coordinator.decoding.decoders import Decoder, DiffusionFast, MaskDrafts, TextDrafts, Verified
from coordinator.decoding.suffix_automaton import TextSearch
from coordinator.decoding.window_lengths import TEXT_WINDOWS, WindowChooser
from coordinator.planning.costs import StepCosts
from coordinator.sessions.cache_costs import CacheCosts
from coordinator.sessions.request import Request
from coordinator.sessions.scheduler import Scheduler
from coordinator.sessions.session import Session
from coordinator.sessions.stored_prefixes import StoredPrefixes
from protos.brigade_pb2 import CACHE_INT8, Cache, Frame, Result, Sample, Sampling, Window
from worker.compute.header import num_rows
from worker.memory.history import History

VOCAB = 50
PLENTY = 10**9
SNAPSHOT_BYTES = 10  # on the first stage
_POWERS = np.array([pow(31, n, 1009) for n in range(10_000)])


def continuation(tokens: Iterable[int], seed: int = 0) -> Iterable[int]:
    """What the model of these tests says after these tokens: every token matters, and so does its place.

    With a seed it is drawn, by that and the place.
    """
    known = np.fromiter(tokens, np.int64)
    position = len(known)
    value = int(_POWERS[position] * 7 + _POWERS[:position] @ (known[::-1] + 1)) % 1009  # by Horner's rule
    while True:
        token = (value + seed * (position * position + 1)) % VOCAB
        yield token
        value = (value * 31 + token + 1) % 1009
        position += 1


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    return next(iter(continuation(tokens, seed)))


def plain_answer(prompt: Sequence[int], max_tokens: int, eos: frozenset[int] = frozenset(), seed: int = 0) -> list[int]:
    answer: list[int] = []
    for token in islice(continuation(prompt, seed), max_tokens):
        answer.append(token)
        if token in eos:
            break
    return answer


def prompt_of(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(f"{length} {seed}")
    return [numbers.randrange(VOCAB) for _ in range(length)]


def costs_per_row(budget: int = PLENTY, num_stages: int = 2, cuttable: int = PLENTY) -> CacheCosts:
    """Every row takes two bytes on the first stage, four on the second and so on; half of that as int8."""

    def bytes_of(cache: Cache, rows: int) -> tuple[int, ...]:
        return tuple(rows * (stage + 1) * (1 if cache.kind == CACHE_INT8 else 2) for stage in range(num_stages))

    return CacheCosts(
        budgets=tuple(budget * 2 * (stage + 1) for stage in range(num_stages)),  # `budget` rows of a full cache
        nodes=tuple(f"node-{stage}" for stage in range(num_stages)),
        bytes_of=bytes_of,
        rows_that_can_be_cut=lambda cache: cuttable,
        snapshot_bytes=lambda cache: tuple(SNAPSHOT_BYTES * (stage + 1) for stage in range(num_stages)),
    )


@dataclass
class Held:
    """What the stages have in one slot. `num_rows` counts rejected drafts and MASK rows too, up to the next cut."""

    history: History
    cache: Cache
    num_rows: int = 0
    seed: int = 0  # of what is sampled; 0 is greedy
    snapshots: set[int] = field(default_factory=set)
    starts: set[int] = field(default_factory=set)  # lengths to which it can be cut because it is a copy
    wrong: set[int] = field(default_factory=set)  # rows that are no part of a text: of another place, or incomplete


@dataclass
class FakeChain:
    """All stages at once: results come in the order of the frames. Refuses whatever a stage would, and more.

    Guesses for the places of MASK rows are right where they would be filled, and mostly where they are verified. On a
    lossy chain those to be filled are anything, by all that their row sees: what is filled ahead decides on the text.
    """

    epoch: int = 1
    cuttable: int = PLENTY
    is_lossy: bool = False
    slots: dict[int, Held] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    in_flight: deque[tuple[Frame, Result]] = field(default_factory=deque)
    openings: list[tuple[int, int]] = field(default_factory=list)  # slot and seed
    freed_here: set[int] = field(default_factory=set)  # slots that only the first stage was told to free
    disk: dict[bytes, list[int]] = field(default_factory=dict)  # by a piece's name: the tokens up to its end

    def send(self, frame: Frame) -> None:
        assert frame.epoch == self.epoch
        assert frame.step == len(self.frames) + 1
        assert frame.windows or frame.closed or frame.opened or frame.stores, "a frame for nothing"
        assert not frame.stores or not (frame.windows or frame.opened)
        frame = Frame.FromString(frame.SerializeToString())
        self.frames.append(frame)
        self._open_and_close(frame)
        slots = [window.slot for window in frame.windows]
        assert len(set(slots)) == len(slots), "two windows of one slot"
        assert {opening.slot for opening in frame.opened} <= set(slots), "opened before it is needed"
        result = Result(epoch=frame.epoch, step=frame.step)
        for window in frame.windows:
            if window.stored:
                assert len(frame.windows) == 1
                self._read(window, result)
            else:
                self._take(window, result)
        for store in frame.stores:
            slot, piece = self.slots[store.slot], store.piece
            assert piece.end <= len(slot.history) and slot.history.prefix_hash(piece.end) == store.prefix_hash
            assert slot.num_rows <= self.cuttable or piece.end in slot.snapshots, "rows that are gone"
            self.disk[piece.name] = slot.history.tokens[: piece.end]
        self.in_flight.append((frame, result))

    def receive(self) -> Result:
        return self.in_flight.popleft()[1]

    @property
    def windows(self) -> list[tuple[int, int, int, int]]:
        """Slot, base, length and wanted rows of every window so far."""
        return [(w.slot, w.base, len(w.tokens), w.wanted) for frame in self.frames for w in frame.windows]

    @property
    def lanes_in_flight(self) -> list[list[int]]:
        """The slots of each frame in flight that asks every one of them for tokens."""
        return [
            [window.slot for window in frame.windows]
            for frame, _ in self.in_flight
            if frame.windows and all(window.wanted or window.guessed for window in frame.windows)
        ]

    @property
    def forks(self) -> list[tuple[int, int]]:
        """Every slot that began as a copy, and of which."""
        return [(o.slot, o.fork_of) for frame in self.frames for o in frame.opened if o.HasField("fork_of")]

    def held(self, bytes_of: Callable[[Cache, int], tuple[int, ...]]) -> tuple[int, ...]:
        """Bytes by stage of all rows of all slots."""
        sizes = [
            tuple(size + len(slot.snapshots) * SNAPSHOT_BYTES * stage for stage, size in enumerate(rows, 1))
            for slot in self.slots.values()
            for rows in (bytes_of(slot.cache, slot.num_rows),)
        ]
        return tuple(map(sum, zip(*sizes, strict=True))) if sizes else (0,) * len(bytes_of(Cache(), 0))

    def _open_and_close(self, frame: Frame) -> None:
        before = dict(self.slots)
        for slot in frame.closed:
            if slot in self.freed_here:
                self.freed_here.remove(slot)
            else:
                del self.slots[slot]  # KeyError: closed twice, or never opened
        if frame.stays:
            self.freed_here.update(frame.closed)
        for opening in frame.opened:
            held = Held(History(), opening.cache)
            if opening.HasField("fork_of"):
                assert opening.fork_of in before, f"slot {opening.fork_of} is not open, so it cannot be copied"
                source = before[opening.fork_of]
                assert source.cache == opening.cache, "a copy of another kind of cache"
                held = Held(source.history.fork(len(source.history)), source.cache, source.num_rows)
                held.snapshots, held.starts = set(opening.snapshots), source.snapshots
                held.wrong = set(source.wrong)
                assert held.snapshots <= source.snapshots, "a snapshot that is not there"
            held.seed = opening.sampling.seed if opening.sampling.temperature else 0
            goes_on = opening.HasField("fork_of") and opening.fork_of == opening.slot
            assert goes_on or opening.slot not in self.slots, "opened twice"
            self.slots[opening.slot] = held
            self.openings.append((opening.slot, opening.sampling.seed))

    def _take(self, window: Window, result: Result) -> None:
        slot, num_tokens = self.slots[window.slot], len(window.tokens)
        assert num_tokens >= max(1, window.wanted) and window.guessed <= window.masks
        assert len(window.positions) in (0, num_rows(window))
        assert window.base <= len(slot.history)
        assert window.prefix_hash == slot.history.prefix_hash(window.base)
        can_be_cut = slot.num_rows <= self.cuttable or window.base in slot.starts
        assert window.base == slot.num_rows or can_be_cut, "cut where it cannot be cut"
        slot.starts = set()
        assert all(length <= window.base for length in slot.snapshots), "a snapshot of what is cut"
        if window.snapshots:
            *earlier, now = window.snapshots
            assert set(earlier) <= slot.snapshots and now == window.base + num_tokens and not window.wanted
            slot.snapshots = set(window.snapshots)
        slot.wrong = {row for row in slot.wrong if row < window.base}
        assert not slot.wrong, "continued behind rows of other places"
        slot.wrong = {window.base + row for row, at in enumerate(window.positions) if at != window.base + row}
        slot.history.cut(window.base)
        slot.history.extend(window.tokens)
        slot.num_rows = window.base + num_rows(window)
        for row in range(num_tokens - window.wanted, num_tokens):
            token = next_token(slot.history.tokens[: window.base + row + 1], slot.seed)
            result.samples.append(Sample(slot=window.slot, token=token))
        result.guesses.extend(self._guesses(window, slot.history.tokens, slot.seed))

    def _read(self, window: Window, result: Result) -> None:
        slot, end = self.slots[window.slot], window.base + len(window.tokens)
        assert window.base <= len(slot.history) and not (window.wanted or window.masks or window.snapshots)
        assert window.prefix_hash == slot.history.prefix_hash(window.base)
        slot.history.cut(window.base)
        slot.num_rows = window.base
        if window.stored not in self.disk:
            result.failures.add(slot=window.slot, kind="PrefixLost")
            slot.starts, slot.snapshots = {0}, set()
            return
        slot.history.extend(window.tokens)
        assert self.disk[window.stored] == slot.history.tokens, "the rows of another text"
        slot.num_rows, slot.starts = end, set()

    def _guesses(self, window: Window, tokens: Sequence[int], seed: int) -> Iterable[Sample]:
        if not window.guessed:
            return
        num_tokens = len(window.tokens)
        at = list(window.positions) or list(range(window.base, window.base + num_rows(window)))
        masks = at[num_tokens : num_tokens + window.guessed]
        known = window.base + num_tokens - window.wanted + 1 if window.wanted else masks[0]
        text = list(islice(continuation(tokens[:known], seed), masks[-1] + 1 - known))
        if self.is_lossy and not window.wanted:
            seen = [*enumerate(tokens[: window.base]), *zip(at, tokens[window.base :], strict=False)]
            numbers = random.Random(f"{seed} {seen}")
            text = [numbers.randrange(VOCAB) for _ in text]
        for position in masks:
            is_right = not window.wanted or (position * 7 + known) % 5
            token = text[position - known] if is_right else VOCAB - 1
            yield Sample(slot=window.slot, token=token, entropy=(position * 13 + known) % 10 / 10)


def make_session(
    prompt: Sequence[int],
    max_tokens: int,
    eos: frozenset[int] = frozenset(),
    decoder: Decoder | None = None,
    *,
    chunk: int = 256,
    owner: str = "",
    **fields: Any,
) -> Session:
    """The session of a request with these fields."""
    return Session(Request(tuple(prompt), max_tokens, eos=eos, **fields), decoder, chunk=chunk, owner=owner)


class Rig:
    """A scheduler and its chain, stepped as the coordinator steps them: what has ended is closed at once."""

    def __init__(
        self,
        *,
        num_stages: int = 3,
        chunk: int = 4,
        epoch: int = 1,
        budget: int = PLENTY,
        cuttable: int = PLENTY,
        max_waiting: int = 1024,
        keep: bool = False,
        lanes: Callable[[int, float], int] | None = None,
        most_lane_rows: int | None = None,
        stored: StoredPrefixes | None = None,
        answers_alone: bool = False,
    ) -> None:
        """`budget` in rows; `keep` says whether the slots of those who end are kept, `stored` what is on disk."""
        self.costs = costs_per_row(budget, num_stages, cuttable)
        self.scheduler = Scheduler(
            *(num_stages, self.costs, epoch, max_waiting, lanes),
            most_lane_rows=most_lane_rows,
            stored=stored,
            answers_alone=answers_alone,
        )
        self.chain = FakeChain(epoch, cuttable)
        self.num_stages = num_stages
        self.chunk = chunk
        self.keep = keep
        self._answers_alone = answers_alone
        self._first_slots: dict[int, Held] = {}  # of the first stage, before this chain

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 3, eos: frozenset[int] = frozenset(), seed: int = 0, **more: Any
    ) -> Session:
        session = make_session(prompt, max_tokens, eos, chunk=self.chunk, sampling=Sampling(seed=seed), **more)
        self.scheduler.slots.add(session)
        return session

    def lose_chain(self, sessions: Iterable[Session], num_begun: int | None = None) -> None:
        """All that the stages hold and all that is in flight is gone; the sessions go on with another chain.

        But what the first stage holds after it has begun `num_begun` frames, if that is given.
        """
        held = {} if num_begun is None else self._held_after(num_begun)
        epoch, before = self.chain.epoch + 1, self.scheduler.slots
        self.scheduler = Scheduler(
            *(self.num_stages, self.costs, epoch, before.max_waiting), answers_alone=self._answers_alone
        )
        kept = self.scheduler.slots.adopt(before, {number: slot.history for number, slot in held.items()})
        self._first_slots = {number: held[number] for number in kept}
        self.chain = FakeChain(epoch, self.chain.cuttable, self.chain.is_lossy, deepcopy(self._first_slots))
        for session in sessions:
            session.rewind()
            self.scheduler.slots.add(session, is_replayed=True)

    def _held_after(self, num_begun: int) -> dict[int, Held]:
        """What the first stage holds then. Rows that passed all stages are complete once their result has come."""
        stage = FakeChain(self.chain.epoch, self.chain.cuttable, self.chain.is_lossy, deepcopy(self._first_slots))
        awaited = {frame.step for frame, _ in self.chain.in_flight}
        begun = self.chain.frames[:num_begun]
        for frame in begun:
            stage.send(frame)
        for frame in begun if self._answers_alone else ():
            for window in frame.windows if frame.step in awaited and not frame.stays else ():
                stage.slots[window.slot].wrong |= set(range(window.base, window.base + num_rows(window)))
        return stage.slots

    def send_one(self) -> Frame | None:
        if (frame := self.scheduler.schedule()) is not None:
            self.chain.send(frame)
        return frame

    def send_all(self) -> list[Frame]:
        frames = []
        while (frame := self.send_one()) is not None:
            frames.append(frame)
        return frames

    def take_one(self) -> list[tuple[Session, list[Sample]]]:
        commits = self.scheduler.commit(self.chain.receive())
        for session, _ in commits:
            if session.finish_reason is not None:
                self.scheduler.close(session, keep=self.keep)
        return commits

    def step(self) -> list[tuple[Session, list[Sample]]]:
        self.send_all()
        return self.take_one()

    def step_until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            self.step()

    def run(self, *sessions: Session) -> None:
        """Step until these sessions have ended: each with its answer of `plain_answer`, unless the chain is lossy."""
        self.step_until(lambda: all(session.finish_reason is not None for session in sessions))
        for asked, answer in [(session.request, session.generated) for session in sessions if not self.chain.is_lossy]:
            seed = asked.sampling.seed if asked.sampling.temperature else 0
            assert answer == plain_answer(asked.prompt, asked.max_tokens, asked.eos, seed)

    def answer(self, prompt: Sequence[int], max_tokens: int = 3, **more: Any) -> Session:
        """Submit, run to the end and let the frame that closes go."""
        session = self.submit(prompt, max_tokens, **more)
        self.run(session)
        self.drain()
        return session

    def drain(self) -> None:
        self.send_all()
        while not self.scheduler.is_idle:
            self.step()
            self.send_all()

    def end(self) -> None:
        """No one is left, nothing is kept."""
        self.drain()
        self.scheduler.slots.forget_kept()
        self.drain()
        assert self.chain.slots == {}
        assert not any(self.scheduler.slots.reserved)


def masked(chooser: WindowChooser, eos: frozenset[int] = frozenset()) -> Decoder:
    """Drafts from MASK rows."""
    return Verified(MaskDrafts(chooser, eos))


def from_text(costs: StepCosts | None = None) -> Decoder:
    """Drafts from the text."""
    return Verified(TextDrafts(WindowChooser(costs or StepCosts(), TEXT_WINDOWS), TextSearch()))


def decoders(eos: frozenset[int] = frozenset(), window: int = 8) -> dict[str, Callable[[], Decoder]]:
    """One of each kind, with windows of this size where it has any."""
    return {
        "ar": Verified,
        "ngram": from_text,
        "diffusion": lambda: masked(WindowChooser(StepCosts(), fixed=window), eos),
        "diffusion-fast": lambda: DiffusionFast(window, 0.4, 0.02, eos),
    }
