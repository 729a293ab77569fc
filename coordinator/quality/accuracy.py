"""What answers to questions come to: accuracy with its interval, and what decoding them took. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.sessions.output import Output

_Z = 1.959964  # of 95 %


@dataclass(frozen=True)
class EvalAnswer:
    """The answer to one question by one decoder, as its line in the file of answers has it."""

    text: str  # without thoughts
    finish_reason: str
    tokens: int
    steps: int  # windows that asked for tokens
    rows: int  # after those of the prompt
    ms: float  # from the request to the last token: a window may hold a whole answer


def eval_answer(outputs: Sequence[Output]) -> EvalAnswer:
    """Return what all outputs of one answer add up to."""
    usage, reason = outputs[-1].usage, outputs[-1].finish_reason
    assert usage is not None and reason is not None
    times = [output.at for output in outputs if output.tokens or output.text]  # nanoseconds
    ms = (times[-1] - usage.started) / 1e6 if times else 0.0
    rows = max(0, usage.num_rows - (usage.num_prompt - usage.num_reused))
    text = "".join(output.content for output in outputs)
    return EvalAnswer(text, reason, usage.num_generated, usage.num_steps, rows, ms)


@dataclass(frozen=True)
class AccuracyRow:
    """How one decoder does on one set of questions."""

    questions: str
    decoder: str
    num: int
    num_right: int
    equal_to_ar: float | None  # share of answers with the same text; None without any by `ar`
    tokens_per_step: float | None
    rows_per_token: float | None
    ms_per_token: float | None

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.num_right, self.num)

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {**asdict(self), "accuracy": self.num_right / self.num, "low": low, "high": high}


def accuracy_row(
    questions: str,
    decoder: str,
    answers: Sequence[EvalAnswer],
    right: Sequence[bool],
    by_ar: Sequence[EvalAnswer] | None,
) -> AccuracyRow:
    """Return the row of one decoder's answers; rows leave out the prompts with the first tokens, times have them."""
    tokens, steps = sum(each.tokens for each in answers), sum(each.steps for each in answers)
    rows, ms = sum(each.rows for each in answers), math.fsum(each.ms for each in answers)
    later = sum(max(0, each.tokens - 1) for each in answers)
    equal = None
    if by_ar is not None:
        equal = sum(one.text == other.text for one, other in zip(answers, by_ar, strict=True)) / len(answers)
    return AccuracyRow(
        *(questions, decoder, len(answers), sum(right), equal),
        tokens_per_step=tokens / steps if steps else None,
        rows_per_token=rows / later if later and steps else None,
        ms_per_token=ms / tokens if tokens else None,
    )


def wilson(num_right: float, num: float) -> tuple[float, float]:
    """Return the bounds of a share by Wilson's score interval (1927) of 95 %."""
    share, z2 = num_right / num, _Z * _Z
    middle, half = share + z2 / (2 * num), _Z * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    return max(0.0, (middle - half) / (1 + z2 / num)), min(1.0, (middle + half) / (1 + z2 / num))
