"""What becomes of a cluster's answer, given the logits that a reference has at each row."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from coordinator.quality.replay import CHUNK, ForcedPass, Replay
from coordinator.quality.report import ComparedAnswer, Rounding
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from worker.compute.sampling import Sampler

V, N = 30, 6
PROMPT = tuple(range(3, 3 + CHUNK + 1))  # its last chunk is one row, as roughness needs
_RANDOM = np.random.default_rng(1)
ROWS = mx.array(  # alike enough that tokens come again and are penalised
    (_RANDOM.normal(scale=2, size=V) + _RANDOM.normal(scale=0.5, size=(len(PROMPT) + N, V))).astype(np.float32)
)
SAMPLED = Sampling(seed=5, temperature=0.9)
PENALISED = Sampling(repetition_penalty=1.4, frequency_penalty=0.3)

Rows = Callable[[int], mx.array]


def alone(sampling: Sampling) -> list[int]:
    """What one process would say, if its logits depended on nothing but the position."""
    sampler, tokens = Sampler(sampling), list(PROMPT)
    for row in range(len(PROMPT) - 1, len(PROMPT) + N - 1):
        draws = sampler(ROWS[row : row + 1], [len(tokens)], tokens, [len(tokens)])
        tokens.append(draws.to_samples(slot=0)[0].token)
    return tokens[len(PROMPT) :]


def read(forced: ForcedPass, rough: float) -> None:
    first = 0
    for window in forced.windows:
        logits = ROWS[first : first + len(window)]
        forced.hand_over(first, logits + (rough * mx.sin(mx.arange(V)) if len(window) > 1 else 0.0))
        first += len(window)


def replayed(found: Sequence[int], sampling: Sampling, rough: float = 0.0, num_tokens: int = N) -> ComparedAnswer:
    """The case, where windows of more than a row are rounded otherwise."""
    replay = Replay("case", Request(PROMPT, num_tokens, sampling), found)
    read(replay.decode_pass(), rough)
    for forced in replay.rounding_passes():
        read(forced, rough)
    return replay.case()


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_an_answer_of_one_process_is_found_equal(sampling: Sampling) -> None:
    case = replayed(alone(sampling), sampling)
    assert (case.verdict, case.expected, case.num_equal) == ("equal", alone(sampling), N)
    assert case.margin is not None and 0 < case.margin < 5
    if sampling == Sampling():
        rows = np.sort(np.array(ROWS[len(PROMPT) - 1 : len(PROMPT) + N - 1]), axis=-1)
        assert case.margin == pytest.approx(float((rows[:, -1] - rows[:, -2]).min()), rel=1e-3)


def test_the_prompt_comes_in_chunks_and_the_answer_token_by_token() -> None:
    found = alone(Sampling())
    forced = Replay("case", Request(PROMPT, N), found).decode_pass()
    assert [list(window) for window in forced.windows] == [
        [*PROMPT[:CHUNK]], [*PROMPT[CHUNK:]], *([token] for token in found[:-1]),
    ]  # fmt: skip
    assert list(forced.wanted) == list(range(len(PROMPT) - 1, len(PROMPT) + N - 1))


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("at", [0, 3, N - 1])
def test_one_wrong_token_is_the_one_difference(sampling: Sampling, at: int) -> None:
    """What follows is drawn after the wrong one, and compared too."""
    found = alone(sampling)
    found[at] = (found[at] + 7) % V
    case = replayed(found, sampling)
    assert (case.verdict, case.differences, case.num_equal) == ("DIFFERS", [at], N - 1)
    assert case.rounding == Rounding(case.roundings[at].margin, 0.0) and case.rounding.margin > 0


@pytest.mark.parametrize(("rough", "verdict"), [(0.0, "DIFFERS"), (1e-4, "DIFFERS"), (40.0, "rounding")])
def test_a_difference_is_explained_only_if_windows_of_other_lengths_differ_as_much(rough: float, verdict: str) -> None:
    found = alone(Sampling())
    found[2] = int(mx.argsort(ROWS[len(PROMPT) + 1])[-2].item())
    case = replayed(found, Sampling(), rough)
    assert (case.verdict, case.differences) == (verdict, [2])
    assert case.roundings[2].measured == pytest.approx(rough * max(abs(math.sin(i)) for i in range(V)), rel=0.01)


@pytest.mark.parametrize(("found", "num_expected"), [([], 1), (alone(Sampling())[:3], 4), ([*alone(Sampling()), 1], N)])
def test_a_missing_token_and_one_too_many_are_differences(found: list[int], num_expected: int) -> None:
    case = replayed(found, Sampling())
    assert (case.verdict, len(case.expected)) == ("DIFFERS", num_expected)
    assert case.expected == alone(Sampling())[:num_expected]


def test_of_many_differences_only_the_first_are_measured() -> None:
    """Each that is measured keeps logits meanwhile."""
    rows = mx.concatenate([ROWS] * 3)
    worst = [int(mx.argmin(rows[len(PROMPT) - 1 + i]).item()) for i in range(12)]
    replay = Replay("case", Request(PROMPT, 12), worst)
    forced = replay.decode_pass()
    forced.hand_over(0, rows[: len(PROMPT) + 11])
    for other in replay.rounding_passes():
        other.hand_over(0, rows[: len(PROMPT) + 11] + 1e6)
    case = replay.case()
    assert (len(case.differences), sorted(case.roundings), case.verdict) == (12, [*range(8)], "DIFFERS")
    assert all(rounding.explains for rounding in case.roundings.values()), "but not what was not measured"


def test_each_wanted_row_is_handed_over_with_its_own_logits() -> None:
    taken: list[tuple[int, list[list[float]]]] = []
    forced = ForcedPass([[7, 8, 9], [5]], {1, 3}, lambda row, logits: taken.append((row, logits.tolist())))  # type: ignore[arg-type]
    assert [forced.is_wanted(first, count) for first, count in ((0, 1), (0, 2), (2, 1), (2, 2))] == [0, 1, 0, 1]
    forced.hand_over(0, mx.array([[0.0, 1], [2, 3], [4, 5]]))
    forced.hand_over(3, mx.array([[6.0, 7]]))
    assert taken == [(1, [[2, 3]]), (3, [[6, 7]])]
