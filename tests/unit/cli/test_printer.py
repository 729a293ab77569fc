"""What stands on the two streams once an answer is there, broke off, or was interrupted."""

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.cli.demo import compare
from coordinator.cli.generate import how_drawn, how_it_ended
from coordinator.cli.report import print_summary
from coordinator.cli.show import Printer
from coordinator.sessions.output import Answer, Token, Usage
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from worker.errors import StageLost


def print_pieces(pieces: Sequence[str], end: BaseException | None = None, *, is_silent: bool = False) -> None:
    with Printer(is_silent=is_silent) as printer:
        for piece in pieces:
            printer.count(1)
            printer.write(piece)
        if end is not None:
            raise end


def test_a_whole_answer_is_its_text_and_a_line_end(capsys: pytest.CaptureFixture[str]) -> None:
    print_pieces(["Hel", "lo\n"])
    assert capsys.readouterr() == ("Hello\n\n", "")


@pytest.mark.parametrize(("pieces", "out"), [(["Hel", "lo"], "Hello\n"), (["Hi\n", ""], "Hi\n"), ([], "")])
def test_what_breaks_off_leaves_no_line_open(capsys: pytest.CaptureFixture[str], pieces: list[str], out: str) -> None:
    """Or the error would be glued to the answer's last word."""
    with pytest.raises(StageLost):
        print_pieces(pieces, StageLost("gone"))
    assert capsys.readouterr() == (out, "")


def test_whoever_interrupts_is_told_what_there_was(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(asyncio.CancelledError):
        print_pieces(["a", "b", "c"], asyncio.CancelledError())
    out, err = capsys.readouterr()
    assert out == "abc\n"
    assert err.startswith("interrupted after 3 tokens, ") and err.count("\n") == 1


def test_an_interrupt_before_the_first_token_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(asyncio.CancelledError):
        print_pieces([], asyncio.CancelledError())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("end", [None, StageLost("gone")])
def test_json_alone_has_standard_output(capsys: pytest.CaptureFixture[str], end: BaseException | None) -> None:
    if end is None:
        print_pieces(["a"], is_silent=True)
    else:
        with pytest.raises(StageLost):
            print_pieces(["a"], end, is_silent=True)
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_left_is_written_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokenPipeError):
        print_pieces(["a"], BrokenPipeError())
    assert capsys.readouterr().out == "a"


def make_answer(
    tokens: Sequence[int] = (5, 6, 7), finish_reason: str = "length", num_steps: int = 2, stop: str | None = None
) -> Answer:
    answer = Answer(usage=Usage(4, 0, 0, num_steps, 4), finish_reason=finish_reason, stop=stop)
    answer.samples = [Token(token) for token in tokens]
    answer.token_times = [500_000_000 + 250_000_000 * i for i in range(len(tokens))]
    return answer


def test_the_summary_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(make_answer(), "ended by itself", "sampled at --temp 1, --seed 3")
    assert capsys.readouterr().err.splitlines() == [
        "",
        "3 tokens, 4.0 tok/s, 1.50 per step; first after 0.500 s (prompt: 4 tokens, 8.0 tok/s)",
        "ended by itself; sampled at --temp 1, --seed 3",
    ]


@pytest.mark.parametrize(
    ("max_tokens", "answer", "said"),
    [
        (3, make_answer(), "cut off at --max-tokens 3"),
        (500, make_answer(range(124)), "cut off where the model's context of 128 tokens ends"),
        (9, make_answer(), "cut off where the memory of the nodes ends"),
        (9, make_answer((5, 2), "stop"), "ended by itself"),
        (9, make_answer((5, 5), "stop"), "ended because it repeated itself"),
        (9, make_answer((5, 6), "stop", stop="!"), "ended at a --stop text"),
    ],
)
def test_it_is_told_why_the_answer_ended(max_tokens: int, answer: Answer, said: str) -> None:
    assert how_it_ended(Request((1,) * 4, max_tokens, eos=frozenset([2])), answer, 128) == said


@pytest.mark.parametrize(
    ("sampling", "defaults", "said"),
    [
        (Sampling(seed=3), {}, ""),
        (Sampling(seed=3, temperature=0.7), {}, "sampled at --temp 0.7, --seed 3"),
        (
            Sampling(seed=3, temperature=0.6, top_k=20),
            {"temperature": 0.6, "top_k": 20},
            "sampled as the model's generation_config.json says (temperature 0.6, top_k 20), --seed 3",
        ),
    ],
)
def test_the_seed_of_a_sampled_answer_is_told_and_whose_choice_that_was(
    sampling: Sampling, defaults: dict[str, float], said: str
) -> None:
    assert how_drawn(sampling, defaults) == said


def test_the_demo_compares_windows_with_one_token_per_step() -> None:
    assert compare(make_answer(num_steps=1), make_answer(num_steps=3)).splitlines() == [
        "in windows         3 tokens in 1 steps, 4.0 tok/s",
        "one token per step 3 tokens in 3 steps, 4.0 tok/s: the same tokens",
    ]
    assert compare(make_answer(), make_answer((5, 6, 8))).endswith("OTHER TOKENS")
