"""Step: what one stage has begun for one frame."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import mlx.core as mx

from protos.brigade_pb2 import Failure, Frame, Result, Timing, Window
from worker.compute.header import num_rows
from worker.compute.sampling import Draws, Scores


@dataclass
class Step:
    """A frame that the device is at: when `pending` is evaluated its layers are done, then come its draws."""

    frame: Frame
    timing: Timing
    begun: int = 0  # when `begin` returned, nanoseconds
    is_under_way: bool = False  # since before its frame came
    windows: list[Window] = field(default_factory=list)  # those of the frame that have not failed here
    failures: list[Failure] = field(default_factory=list)  # of this stage
    pending: list[mx.array] = field(default_factory=list)
    draws: list[tuple[Window, Draws]] = field(default_factory=list)
    scores: list[tuple[Window, Scores]] = field(default_factory=list)
    checks: list[tuple[int, mx.array]] = field(default_factory=list)  # slot, and whether what was made of it is finite


def rows_of(some: Sequence[Window], windows: Sequence[Window], x: mx.array) -> mx.array:
    """Of hidden states x, whose rows are those of `windows`, the rows of some of them."""
    if len(some) == len(windows):
        return x
    left = {window.slot for window in some}
    firsts = accumulate(map(num_rows, windows), initial=0)
    spans = [(first, num_rows(w)) for w, first in zip(windows, firsts, strict=False) if w.slot in left]
    return x[:, mx.array([row for first, count in spans for row in range(first, first + count)])]


def passed_on(step: Step) -> Frame:
    """The header of what goes to the next stage: what has not failed here."""
    frame = step.frame
    passed = Frame(epoch=frame.epoch, step=frame.step, closed=frame.closed, opened=frame.opened)
    passed.windows.extend(step.windows)
    return passed


def result_of(step: Step) -> Result:
    """What the last stage has found, once it is computed."""
    result = Result(epoch=step.frame.epoch, step=step.frame.step)
    for window, draws in step.draws:
        samples = draws.to_samples(window.slot)
        result.samples.extend(samples[: window.wanted])
        result.guesses.extend(samples[window.wanted :])
    for window, scores in step.scores:
        result.scores.extend(scores.to_scores(window.slot))
    return result
