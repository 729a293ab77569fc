"""Which guesses of diffusion windows are safe to keep: thresholds from guesses whose truth is known.

`diffusion-fast` keeps a guess whose entropy, plus a penalty per position, is below a threshold (`choose_fills`). Its
guesses for an answer that is known, as one-token decoding gives it, show which of them hold.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from coordinator.decoding.decode_options import FILL_WINDOW, Decode
from coordinator.decoding.decoders import Accepted, Decoder, DiffusionFast, Proposal
from coordinator.quality.accuracy import wilson
from protos.brigade_pb2 import Sample
from worker.errors import InputError

PENALTIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # nats per position


class Guess(NamedTuple):
    """What the model guessed for a place without knowing the places before it."""

    entropy: float  # nats
    distance: int  # positions from the first guess of its step
    holds: bool  # whether it is the token that one-token decoding gives there
    question: str
    place: int  # the position: it is guessed in one step after another
    step: int  # of its question


@dataclass(frozen=True)
class Kept:
    """Guesses below a threshold."""

    num: int
    num_held: int
    num_places: int  # that they are for

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the share that holds: guesses for one place are not independent and count as one."""
        return wilson(self.num_held / self.num * self.num_places, self.num_places)


@dataclass(frozen=True)
class Calibration:
    """The rule that keeps most guesses of one kind of task, and what it comes to on guesses held out."""

    entropy_threshold: float  # nats
    position_penalty: float  # nats per position
    num: int  # guesses held out
    kept: Kept  # of these

    def as_json(self) -> dict[str, Any]:
        low, high = self.kept.interval
        return {
            "entropy_threshold": self.entropy_threshold,
            "position_penalty": self.position_penalty,
            "num": self.num,
            "num_kept": self.kept.num,
            "num_held": self.kept.num_held,
            "agreement": self.kept.num_held / self.kept.num,
            "low": low,
            "high": high,
        }


class _Rule(TypedDict):
    entropy_threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    position_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _File(TypedDict):
    model: str
    kinds: dict[str, _Rule]


_FILE: TypeAdapter[_File] = TypeAdapter(_File)


@dataclass(frozen=True)
class TaughtFill(Decode):
    """`diffusion-fast` that decides on an answer's known tokens instead of its guesses, and logs these."""

    kind: str = "diffusion-fast"
    question: str = ""
    first: int = 0  # position of the answer
    tokens: tuple[int, ...] = ()  # of the answer
    log: list[Guess] = field(default_factory=list, compare=False)

    def make_decoder(self, eos: frozenset[int], *others: Any, **more: Any) -> Decoder:
        return _Taught(self, eos)


class _Taught(DiffusionFast):
    def __init__(self, taught: TaughtFill, eos: frozenset[int]) -> None:
        super().__init__(FILL_WINDOW, taught.entropy_threshold, taught.position_penalty, eos)
        self._taught = taught

    def accept(self, proposal: Proposal, samples: Sequence[Sample], guesses: Sequence[Sample]) -> Accepted:
        masks, true, step = proposal.masks, list[Sample](), len(self._taught.log)
        for at, guess in zip(masks, guesses, strict=True):
            token = self._taught.tokens[at - self._taught.first]
            self._taught.log.append(
                Guess(guess.entropy, at - masks[0], guess.token == token, *(self._taught.question, at, step))
            )
            true.append(Sample(token=token, entropy=guess.entropy))
        return super().accept(proposal, samples, true)


def read_thresholds(path: Path, kind: str) -> tuple[str, float, float]:
    """Return the model, the entropy threshold and the position penalty of a kind of task, from a file of calibration.

    Raises:
        InputError: the file cannot be read, is another one, or does not have this kind.
    """
    try:
        found = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise InputError("entropy_threshold", f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        expected = f"expected a file of `brigade calibrate` in {path}, found another"
        raise InputError("entropy_threshold", expected) from error
    kinds = found["kinds"]
    if kind not in kinds:
        raise InputError("entropy_threshold", f"expected one of {', '.join(kinds)} in {path}, got {kind!r}")
    return found["model"], kinds[kind]["entropy_threshold"], kinds[kind]["position_penalty"]


def find_thresholds(guesses: Sequence[Guess], held_out: Sequence[Guess], agreement: float) -> Calibration | None:
    """Return the rule that keeps most guesses, or None if no rule is shown to reach the agreement.

    `guesses` choose the penalty, and order the thresholds from the one they trust most upwards. `held_out` tests the
    thresholds in this fixed order up to the first that fails (Learn then Test, arXiv 2110.01052, section 2.2), so that
    the number of tests does not weaken their bound: Wilson's lower one of 95 % must be at least `agreement`.
    """
    order, penalty, most = list[float](), PENALTIES[0], 0
    for each in PENALTIES:
        ranked = _ranked(guesses, each)
        reached = [number for number, (_, kept) in enumerate(ranked) if kept.interval[0] >= agreement]
        if reached and (num := ranked[reached[-1]][1].num) > most:
            values = [*(value for value, _ in ranked), ranked[-1][0] + 1e-6]
            safest = max(reached, key=lambda number: ranked[number][1].interval[0])
            order = [(values[number] + values[number + 1]) / 2 for number in reached if number >= safest]
            most, penalty = num, each
    others = _ranked(held_out, penalty)
    values, found = [value for value, _ in others], None
    for threshold in order:
        below = bisect_left(values, threshold)
        if not below or (kept := others[below - 1][1]).interval[0] < agreement:
            break
        found = Calibration(threshold, penalty, len(held_out), kept)
    return found


def _ranked(guesses: Sequence[Guess], penalty: float) -> list[tuple[float, Kept]]:
    """Return the distinct sums of entropy and penalty, ascending, each with the guesses of at most so much.

    The best guess of a step is kept at every threshold, as by `choose_fills`: its sum counts as 0.
    """
    steps: dict[tuple[str, int], list[tuple[float, Guess]]] = {}
    for guess in guesses:
        value = guess.entropy + penalty * guess.distance
        steps.setdefault((guess.question, guess.step), []).append((value, guess))
    ranked = list[tuple[float, Guess]]()
    for (_, best), *others in map(sorted, steps.values()):
        ranked += [(0.0, best), *others]
    ranked.sort()
    places, num_held = set[tuple[str, int]](), 0
    found: list[tuple[float, Kept]] = []
    for number, (value, guess) in enumerate(ranked, 1):
        places.add((guess.question, guess.place))
        num_held += guess.holds
        if number == len(ranked) or ranked[number][0] > value:
            found.append((value, Kept(number, num_held, len(places))))
    return found
