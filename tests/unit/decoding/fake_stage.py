"""All stages as a few functions, for one slot, and sessions that run on them to their end."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.decoding.decoders import Decoder, DiffusionFast, Verified
from coordinator.decoding.window_lengths import WindowChooser
from coordinator.planning.costs import StepCosts
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Sample, Window
from tests.unit.fake_chain import VOCAB, from_text, make_session, masked, next_token
from worker.compute.header import num_rows
from worker.memory.history import History

Guess = Callable[[int], tuple[int, float]]  # position to token and entropy
NextToken = Callable[[list[int]], int]


@dataclass
class FakeStage:
    """All stages, for one slot: refuses what a stage refuses, and answers every row that asks for something."""

    guess: Guess = lambda position: (0, 0.0)
    next_token: NextToken = next_token
    history: History = field(default_factory=History)

    def answer(self, window: Window) -> tuple[list[Sample], list[Sample]]:
        num_tokens = len(window.tokens)
        assert num_tokens >= max(1, window.wanted) and window.guessed <= window.masks
        assert len(window.positions) in (0, num_rows(window))
        assert window.base <= len(self.history)
        assert window.prefix_hash == self.history.prefix_hash(window.base)
        self.history.cut(window.base)
        self.history.extend(window.tokens)
        wanted = range(num_tokens - window.wanted, num_tokens)
        tokens = [self.next_token(self.history.tokens[: window.base + row + 1]) for row in wanted]
        at = positions(window)[num_tokens : num_tokens + window.guessed]
        guesses = [Sample(token=token, entropy=entropy) for token, entropy in map(self.guess, at)]
        return [Sample(token=token) for token in tokens], guesses


@dataclass(frozen=True)
class Step:
    """One window, its answer, what became known, and what was known before."""

    window: Window
    guesses: list[Sample]
    new: list[int]
    before: list[int]

    @property
    def is_chunk(self) -> bool:
        return not (self.window.wanted or self.window.guessed)

    @property
    def num_unfed(self) -> int:
        """Known tokens in the window."""
        return len(self.before) - self.window.base

    @property
    def num_asked(self) -> int:
        """Rows before padding."""
        return len(self.window.tokens) + self.window.guessed


def positions(window: Window) -> list[int]:
    return list(window.positions) or list(range(window.base, window.base + num_rows(window)))


def steps(session: Session, stage: FakeStage) -> Iterator[Step]:
    """Run a session to its end, a window at a time."""
    while session.finish_reason is None:
        before = list(session.history.tokens)
        window = session.next_window()
        samples, guesses = stage.answer(window)
        new = session.commit(samples, guesses)
        yield Step(window, guesses, [sample.token for sample in new], before)


def run(session: Session, stage: FakeStage) -> list[Step]:
    return list(steps(session, stage))


def opened(prompt: Sequence[int], max_tokens: int, *more: Any, **fields: Any) -> Session:
    """A session in slot 0, without a scheduler."""
    session = make_session(prompt, max_tokens, *more, **fields)
    session.slot = 0
    return session


def fixed(window: int) -> WindowChooser:
    return WindowChooser(StepCosts(), fixed=window)


def oracle(text: Sequence[int], quality: float, numbers: random.Random) -> Guess:
    """Guesses what will stand there with this probability, and anything otherwise."""

    def guess(position: int) -> tuple[int, float]:
        right = position < len(text) and numbers.random() < quality
        return (text[position] if right else numbers.randrange(VOCAB)), numbers.random()

    return guess


def decoders(eos: frozenset[int] = frozenset()) -> dict[str, Callable[[], Decoder]]:
    return {
        "ar": Verified,
        "ngram": from_text,
        "diffusion": lambda: masked(fixed(16), eos),
        "diffusion-fast": lambda: DiffusionFast(16, 1e9, 0.02, eos),  # with right guesses: the text, a window at a time
    }
