"""Which guesses of diffusion windows are safe to keep: thresholds from guesses whose truth is known.

`diffusion-fast` keeps a guess whose entropy, plus a penalty per position, is below a threshold (`choose_fills`). Its
guesses for an answer that is known, as one-token decoding gives it, show which of them hold.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from coordinator.decoding.decode_options import FILL_WINDOW, Decode
from coordinator.decoding.decoders import Accepted, Decoder, Fill, Proposal
from coordinator.quality.accuracy import wilson
from protos.brigade_pb2 import Sample
from worker.errors import InputError

PENALTIES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)  # nats per position


class Guess(NamedTuple):
    """What the model guessed for a place without knowing the places before it."""

    entropy: float  # nats
    distance: int  # positions from the first guess of its step
    holds: bool  # whether it is the token that one-token decoding gives there


@dataclass(frozen=True)
class Calibration:
    """The rule that keeps most guesses of one kind of task, and what it comes to on guesses held out."""

    entropy_threshold: float  # nats
    position_penalty: float  # nats per position
    num: int  # guesses held out
    num_kept: int  # of these
    num_held: int  # of those kept: that are the tokens of one-token decoding

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.num_held, self.num_kept)

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {**asdict(self), "agreement": self.num_held / self.num_kept, "low": low, "high": high}


class _Rule(TypedDict):
    entropy_threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    position_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _File(TypedDict):
    kinds: dict[str, _Rule]


_FILE: TypeAdapter[_File] = TypeAdapter(_File)


@dataclass(frozen=True)
class TaughtFill(Decode):
    """`diffusion-fast` that decides on an answer's known tokens instead of its guesses, and logs these."""

    kind: str = "diffusion-fast"
    first: int = 0  # position of the answer
    tokens: tuple[int, ...] = ()  # of the answer
    log: list[Guess] = field(default_factory=list, compare=False)

    def make_decoder(self, eos: frozenset[int], *others: Any, **more: Any) -> Decoder:
        return _Taught(self, eos)


class _Taught(Fill):
    def __init__(self, taught: TaughtFill, eos: frozenset[int]) -> None:
        super().__init__(FILL_WINDOW, taught.entropy_threshold, taught.position_penalty, eos)
        self._taught = taught

    def accept(self, proposal: Proposal, samples: Sequence[Sample], guesses: Sequence[Sample]) -> Accepted:
        masks, true = proposal.masks, list[Sample]()
        for at, guess in zip(masks, guesses, strict=True):
            token = self._taught.tokens[at - self._taught.first]
            self._taught.log.append(Guess(guess.entropy, at - masks[0], guess.token == token))
            true.append(Sample(token=token, entropy=guess.entropy))
        return super().accept(proposal, samples, true)


def read_thresholds(path: Path, kind: str) -> tuple[float, float]:
    """Return the entropy threshold and the position penalty of a kind of task, from a file of `brigade calibrate`.

    Raises:
        InputError: the file cannot be read, or does not have this kind.
    """
    try:
        kinds = _FILE.validate_json(path.read_bytes())["kinds"]
    except OSError as error:
        raise InputError("entropy_threshold", f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        expected = f"expected a file of `brigade calibrate` in {path}, found another"
        raise InputError("entropy_threshold", expected) from error
    if kind not in kinds:
        raise InputError("entropy_threshold", f"expected one of {', '.join(kinds)} in {path}, got {kind!r}")
    return kinds[kind]["entropy_threshold"], kinds[kind]["position_penalty"]


def find_thresholds(guesses: Sequence[Guess], held_out: Sequence[Guess], agreement: float) -> Calibration | None:
    """Return the rule that keeps most guesses at this agreement; None if there is none.

    The lower bound (Wilson's, of 95 %) of the share of kept guesses that hold is at least `agreement` both on the
    guesses that chose the threshold and on those held out.
    """
    found = (_fitted(guesses, held_out, penalty, agreement) for penalty in PENALTIES)
    return max((each for each in found if each), key=lambda each: each.num_kept, default=None)


def _fitted(
    guesses: Sequence[Guess], held_out: Sequence[Guess], penalty: float, agreement: float
) -> Calibration | None:
    """Return the rule of the largest threshold with this penalty."""
    values, sums = _ranked(guesses, penalty)
    others, other_sums = _ranked(held_out, penalty)
    for num in range(len(values), 0, -1):
        if wilson(sums[num], num)[0] < agreement:
            continue
        threshold = mean(values[num - 1 : num + 1])  # between the last guess that is kept and the next one
        num_kept = bisect_left(others, threshold)
        if num_kept and wilson(other_sums[num_kept], num_kept)[0] >= agreement:
            return Calibration(threshold, penalty, len(others), num_kept, other_sums[num_kept])
    return None


def _ranked(guesses: Sequence[Guess], penalty: float) -> tuple[list[float], list[int]]:
    """Return what is compared with the threshold, ascending, and how many of the first 0, 1, 2 ... guesses hold."""
    ranked = sorted((guess.entropy + penalty * guess.distance, guess.holds) for guess in guesses)
    return [value for value, _ in ranked], list(accumulate((holds for _, holds in ranked), initial=0))
