"""Results and reports of the last stage: as they were sent and as they were asked for, or refused by its name."""

import zlib
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos.brigade_pb2 import (
    CONDITIONING_EXACT,
    CONDITIONING_TOP,
    DTYPE_BFLOAT16,
    Alternative,
    Draining,
    Failure,
    Pooled,
    Report,
    Result,
    Sample,
    Score,
    Segments,
    Soft,
    Timing,
)
from tests.unit.fuzz import fuzzed, nearly, within
from worker.compute.header import Asked, check_result
from worker.errors import FrameError
from worker.model.model_spec import LayerSpec, ModelSpec
from worker.node.framing import read_report, write_report

MANY = 1 << 18  # more than any result has of anything
RESULT = Result(
    epoch=2,
    step=9,
    samples=[Sample(slot=1, token=7, logprob=-0.25, entropy=1.5), Sample(slot=2, token=300)],
    timings=[Timing(stage=1, sent=5)],
    failures=[Failure(slot=3, kind="CacheMismatch", message="é")],
)


@pytest.mark.parametrize("what", [Report(result=RESULT), Report(draining=Draining())], ids=["result", "draining"])
def test_no_flipped_bit_of_a_report_changes_what_it_says(what: Report) -> None:
    message = write_report(what)
    check(Report.FromString(message))
    for at in range(len(message)):
        for bit in range(8):
            flipped = bytearray(message)
            flipped[at] ^= 1 << bit
            try:
                found = Report.FromString(bytes(flipped))
            except DecodeError:  # gRPC refuses it, and the call ends
                continue
            with pytest.raises(FrameError, match=r"^worker last: expected a report as it was sent"):
                check(found)


def check(report: Report) -> None:
    """As the coordinator checks what gRPC has read."""
    read_report(report.SerializeToString(deterministic=True), "last")


@pytest.mark.parametrize(
    ("what", "data"), [(Report(result=RESULT), b""), (Report(segments=Segments(step=9, slot=1)), bytes(range(200)))]
)
def test_no_flipped_bit_of_a_report_with_data_changes_what_it_says(what: Report, data: bytes) -> None:
    message = write_report(what, [data[:70], data[70:]] if data else ())
    assert read_report(message, "last") == (what, data)
    assert Report.FromString(message).data == data, "protobuf reads it, too"
    for at in range(len(message)):
        for bit in range(8):
            flipped = bytearray(message)
            flipped[at] ^= 1 << bit
            with pytest.raises(FrameError, match=r"^worker last: expected a report as it was sent"):
                read_report(bytes(flipped), "last")


@pytest.mark.parametrize("repeated", [bytes([1 << 3 | 2, 0]), bytes([9 << 3 | 2, 0])], ids=["result", "unknown"])
def test_a_report_with_a_repeated_field_is_refused(repeated: bytes) -> None:
    """Each costs time: a message of millions would hold up the coordinator."""
    for count in (1, 2):
        content = repeated * count
        message = content + bytes([3 << 3 | 5]) + zlib.crc32(content).to_bytes(4, "little")
        with nullcontext() if count == 1 else pytest.raises(FrameError, match=r"^worker last: expected a report, got"):
            read_report(message, "last")


@given(st.binary(max_size=40))
def test_any_bytes_with_a_checksum_are_a_report_or_refused(content: bytes) -> None:
    message = content + bytes([3 << 3 | 5]) + zlib.crc32(content).to_bytes(4, "little")
    with suppress(FrameError):
        read_report(message, "last")


HIDDEN = 6
SPEC = ModelSpec("tiny", "qwen3", (LayerSpec(1),), 1, 1, False, HIDDEN, 50, 128, DTYPE_BFLOAT16)
ASKED = Asked({1: (2, 0, 0), 4: (0, 3, 0), 5: (0, 0, 0), 6: (1, 0, 2)})


def answered(
    samples: list[int], guesses: list[int], failed: list[int] | None = None, token: int = 49, num_scores: int = 2
) -> Result:
    return Result(
        step=9,
        samples=[Sample(slot=slot, token=token) for slot in samples],
        guesses=[Sample(slot=slot, token=token) for slot in guesses],
        scores=[Score(slot=6, token=token)] * num_scores,
        failures=[Failure(slot=slot) for slot in failed or []],
    )


@pytest.mark.parametrize(
    ("result", "words"),
    [
        *(
            (answered(*slots), r"expected \(samples, guesses, scores\) .* \(step 9\)$")
            for slots in (
                ([1, 6], [4, 4, 4]), ([1, 1, 1, 6], [4, 4, 4]), ([1, 1, 6], [4, 4]), ([1, 1, 5, 6], [4, 4, 4]),
            )
        ),
        (answered([1, 1, 8, 6], [4, 4, 4]), r".*for slot 8, got \(1, 0, 0\)"),
        (answered([1, 1, 6], [4, 4, 4], num_scores=0), r".*for slot 6, got \(1, 0, 0\)"),
        (answered([1, 1, 6], [4, 4, 4], num_scores=3), r".*for slot 6, got \(1, 0, 3\)"),
        (answered([1, 1, 6], [4, 4, 4], token=50), r"expected tokens below 50, got 50 \(step 9\)$"),
    ],
)  # fmt: skip
def test_a_result_answers_exactly_what_was_asked(result: Result, words: str) -> None:
    check_result(answered([1, 1, 6], [4, 4, 4]), ASKED, SPEC, "last")
    check_result(answered([1, 1, 6], [], failed=[4]), ASKED, SPEC, "last")
    with pytest.raises(FrameError, match=f"^worker last: {words}"):
        check_result(result, ASKED, SPEC, "last")


def test_a_result_of_a_million_samples_is_refused_in_a_few_words() -> None:
    result = Result(samples=[Sample(slot=3, token=5)] * MANY)
    with within(1 << 16), pytest.raises(FrameError, match=r"\(262144, 0, 0\)") as refused:
        check_result(result, Asked({3: (1, 0, 0)}), SPEC, "mini")
    assert len(str(refused.value)) < 300


U32 = st.sampled_from([0, 1, 2, 3, 7, 2**31, 2**32 - 1]) | st.integers(0, 4)
SAMPLES: Any = st.lists(st.builds(Sample, slot=U32, token=U32), max_size=4)
RESULTS = st.builds(Result, samples=SAMPLES, guesses=SAMPLES)


@fuzzed(60)
@given(RESULTS | nearly(Result(step=3, samples=[Sample(slot=3, token=5)]).SerializeToString()), st.integers(0, 3))
def test_fuzz_a_result_is_as_it_was_asked_for_or_refused_by_the_nodes_name(result: Result | bytes, wanted: int) -> None:
    try:
        found = Result.FromString(result) if isinstance(result, bytes) else result
    except DecodeError:
        return
    try:
        check_result(found, Asked({3: (wanted, 0, 0)}), SPEC, "mini")
    except FrameError as error:
        assert error.node == "mini" and len(str(error)) < 300
    else:
        answers = [sample for sample in found.samples if sample.slot == 3]
        failed = {failure.slot for failure in found.failures}
        assert 3 in failed or (len(answers) == wanted and not found.guesses)
        assert all(sample.token < 50 for sample in found.samples)


@pytest.mark.parametrize(("token", "count", "wanted"), [(50, 1, 1), (49, 2, 1), (49, 1, 0), (0, MANY, 5)])
def test_alternatives_that_were_not_asked_for_or_are_no_tokens_are_refused(token: int, count: int, wanted: int) -> None:
    def result(count: int, token: int) -> Result:
        return Result(samples=[Sample(slot=3, token=5, alternatives=[Alternative(token=token)] * count)])

    refused = result(count, token)
    with within(1 << 16), pytest.raises(FrameError, match=r"alternatives for slot 3|tokens below 50"):
        check_result(refused, Asked({3: (1, 0, 0)}, {3: wanted}), SPEC, "mini")
    check_result(result(1, 49), Asked({3: (1, 0, 0)}, {3: 1}), SPEC, "mini")


EXACT, TOP = (CONDITIONING_EXACT, 2), (CONDITIONING_TOP, 3)  # rows


def soft_result(*soft: Soft, failed: int | None = None) -> Result:
    return Result(step=9, soft=soft, failures=[] if failed is None else [Failure(slot=failed)])


def softened(result: Result) -> None:
    check_result(result, Asked(dict.fromkeys([1, 4], (0, 0, 0)), soft={1: EXACT, 4: TOP}), SPEC, "last")


def test_what_comes_back_for_the_next_step_of_a_canvas_is_what_was_asked_for_in_finite_numbers() -> None:
    exact = Soft(slot=1, conditioning=CONDITIONING_EXACT, rows=bytes(2 * HIDDEN * 2))
    top = Soft(slot=4, conditioning=CONDITIONING_TOP, rows=bytes(3 * 64 * 2), ids=bytes([49, 0, 0, 0]) * 3 * 64)
    softened(soft_result(exact, top))
    softened(soft_result(top, failed=1))
    for odd in (
        [exact, Soft(slot=4, conditioning=CONDITIONING_TOP, rows=top.rows, ids=bytes([50, 0, 0, 0]) * 3 * 64)],
        *([exact, Soft(slot=4, conditioning=CONDITIONING_TOP, rows=top.rows[2:] + bits, ids=top.ids)]
          for bits in (b"\x00\x7c", b"\x00\x7e", b"\x01\x3c", b"\x00\xbc")),  # infinity, NaN, above 1, -1
        *([Soft(slot=1, conditioning=CONDITIONING_EXACT, rows=exact.rows[2:] + bits), top]
          for bits in (b"\x80\x7f", b"\x80\xff", b"\xc0\x7f")),  # infinities and NaN
    ):  # fmt: skip
        with pytest.raises(
            FrameError, match=r"^worker last: expected (tokens|probabilities|finite) .*\(slot \d, step 9"
        ):
            softened(soft_result(*odd))
    largest = Soft(slot=1, conditioning=CONDITIONING_EXACT, rows=exact.rows[4:] + b"\x7f\x7f\x7f\xff")
    sure = Soft(slot=4, conditioning=CONDITIONING_TOP, rows=top.rows[2:] + b"\x00\x3c", ids=top.ids)
    softened(soft_result(largest, sure))
    for wrong in (
        [exact], [exact, top, top], [exact, top, Soft(slot=5)], [Soft(slot=1), top],
        [Soft(slot=1, conditioning=CONDITIONING_EXACT, rows=exact.rows[1:]), top],
        [Soft(slot=1, conditioning=CONDITIONING_EXACT, rows=exact.rows, ids=b"1"), top],
        [exact, Soft(slot=4, conditioning=CONDITIONING_TOP, rows=top.rows, ids=top.ids[1:])],
    ):  # fmt: skip
        with pytest.raises(FrameError, match=r"^worker last: expected \(slot, conditioning, bytes, bytes of ids\) "):
            softened(soft_result(*wrong))
    with pytest.raises(FrameError):
        softened(soft_result(exact, top, failed=1))


def test_sums_come_for_just_the_rows_that_were_asked_for() -> None:
    one, two = (Pooled(slot=slot, rows=slot + 1, sum=bytes(4 * HIDDEN)) for slot in (1, 2))
    failed = [Failure(slot=2)]
    asked = Asked(dict.fromkeys([1, 2], (0, 0, 0)), pooled={1: 2, 2: 3})
    check_result(Result(pooled=[two, one]), asked, SPEC, "last")
    check_result(Result(pooled=[one], failures=failed), asked, SPEC, "last")
    for wrong in ([one], [one, two, two], [one, Pooled(slot=2, rows=2, sum=two.sum)], [one, Pooled(slot=2, rows=3)]):
        with pytest.raises(FrameError, match=r"^worker last: expected sums of \(slot, rows, bytes\) "):
            check_result(Result(pooled=wrong), asked, SPEC, "last")
