"""What arrives is what was sent, or it is refused: no flipped bit, no part of another frame, none twice is taken."""

import random

import mlx.core as mx
import pytest

from protos.brigade_pb2 import (
    CONDITIONING_EXACT,
    CONDITIONING_TOP,
    DTYPE_BFLOAT16,
    Draining,
    Failure,
    Frame,
    Part,
    Report,
    Result,
    Sample,
    Score,
    Soft,
    Timing,
    Window,
)
from worker.compute.header import check_result, check_soft
from worker.errors import FrameError
from worker.node.framing import ENCRYPTED, PLAIN, Arrival, FrameAssembler, check_seal, seal
from worker.node.hop import pack

WRONG = "expected a part of a frame as it was sent, got .* bytes with a wrong checksum"


def accept(header: Frame) -> None:
    pass


def sent(num_values: int, step: int = 41) -> list[bytes]:
    header = Frame(epoch=3, step=step, windows=[Window(slot=2, tokens=[5, 6], prefix_hash=2**63)], timings=[Timing()])
    return pack(header, mx.random.normal((1, 1, num_values)) if num_values else None)


def arrived(parts: list[bytes]) -> Arrival | None:
    """The frame, if all parts are taken and complete one."""
    joiner = FrameAssembler(accept)
    *_, last = map(joiner.add, parts)
    return last


@pytest.mark.parametrize("num_values", [0, 3])
def test_any_flipped_bit_of_a_frame_is_refused(num_values: int) -> None:
    [part] = sent(num_values)
    assert arrived([part]) is not None
    for at in range(len(part)):
        for bit in range(8):
            flipped = bytearray(part)
            flipped[at] ^= 1 << bit
            with pytest.raises(FrameError, match=WRONG):
                arrived([bytes(flipped)])


def test_flipped_bits_in_any_of_several_parts_are_refused() -> None:
    numbers = random.Random(3)
    parts = sent(PLAIN.part_bytes // 4 * 2 + 5)
    assert len(parts) == 3 and arrived(parts) is not None
    for number, part in enumerate(parts):
        for at in (*range(12), *range(len(part) - 12, len(part)), *(numbers.randrange(len(part)) for _ in range(9))):
            flipped = bytearray(part)
            flipped[at] ^= 1 << numbers.randrange(8)
            with pytest.raises(FrameError, match=WRONG):
                arrived([*parts[:number], bytes(flipped), *parts[number + 1 :]])


def test_a_part_of_another_frame_is_refused_though_it_is_as_long_and_sound() -> None:
    ours, theirs = sent(PLAIN.part_bytes // 4 * 2, step=41), sent(PLAIN.part_bytes // 4 * 2, step=42)
    with pytest.raises(FrameError, match=WRONG):
        arrived([ours[0], theirs[1]])


def test_a_part_without_a_checksum_is_refused_where_there_has_to_be_one() -> None:
    header = Frame(step=41, timings=[Timing()])
    (part,) = pack(header, None, ENCRYPTED)
    with pytest.raises(FrameError, match=WRONG):
        arrived([part])
    assert FrameAssembler(accept, ENCRYPTED).add(part) is not None
    with pytest.raises(FrameError, match=WRONG):
        arrived([b""])


def test_the_checksum_is_a_field_of_the_proto_and_the_last_one() -> None:
    (part,) = sent(3)
    read = Part.FromString(part)
    assert part.endswith(read.checksum.to_bytes(4, "little")) and read.frame.step == 41
    assert read.SerializeToString() == part


def report() -> Report:
    samples = [Sample(slot=1, token=7, logprob=-0.25, entropy=1.5), Sample(slot=2, token=300)]
    failures = [Failure(slot=3, kind="CacheMismatch", message="é")]
    return Report(result=Result(epoch=2, step=9, samples=samples, timings=[Timing(stage=1, sent=5)], failures=failures))


@pytest.mark.parametrize("what", [report(), Report(draining=Draining())], ids=["result", "draining"])
def test_no_flipped_bit_of_a_report_changes_what_it_says(what: Report) -> None:
    message = seal(what).SerializeToString()
    expected = Report.FromString(message)
    check_seal(expected, "last")
    for at in range(len(message)):
        for bit in range(8):
            flipped = bytearray(message)
            flipped[at] ^= 1 << bit
            try:
                found = Report.FromString(bytes(flipped))
            except Exception as error:  # gRPC refuses it, and the call ends
                assert type(error).__name__ == "DecodeError"
                continue
            with pytest.raises(FrameError, match=r"^worker last: expected a report as it was sent"):
                check_seal(found, "last")


ASKED = {1: (2, 0, 0), 4: (0, 3, 0), 5: (0, 0, 0), 6: (1, 0, 2)}


def answered(samples: list[int], guesses: list[int], failed: list[int] | None = None, token: int = 49) -> Result:
    samples_of, guesses_of = ([Sample(slot=slot, token=token) for slot in slots] for slots in (samples, guesses))
    scores = [Score(slot=6, token=token)] * 2
    failures = [Failure(slot=slot) for slot in failed or []]
    return Result(step=9, samples=samples_of, guesses=guesses_of, scores=scores, failures=failures)


def test_a_result_has_an_answer_for_whatever_was_asked() -> None:
    check_result(answered([1, 1, 6], [4, 4, 4]), ASKED, 50, "last")
    check_result(answered([1, 1, 6], [], failed=[4]), ASKED, 50, "last")
    for samples, guesses in (
        ([1, 6], [4, 4, 4]), ([1, 1, 1, 6], [4, 4, 4]), ([1, 1, 6], [4, 4]), ([1, 1, 5, 6], [4, 4, 4]),
    ):  # fmt: skip
        with pytest.raises(FrameError, match=r"^worker last: expected \(samples, guesses, scores\) .* \(step 9\)$"):
            check_result(answered(samples, guesses), ASKED, 50, "last")
    with pytest.raises(FrameError, match=r"for slot 8, got \(1, 0, 0\)"):
        check_result(answered([1, 1, 8, 6], [4, 4, 4]), ASKED, 50, "last")
    for missing in (Result(), Result(scores=[Score(slot=6)] * 3)):
        result = answered([1, 1, 6], [4, 4, 4])
        del result.scores[:]
        result.MergeFrom(missing)
        with pytest.raises(FrameError, match=r"for slot 6, got \(1, 0, [03]\)"):
            check_result(result, ASKED, 50, "last")
    with pytest.raises(FrameError, match=r"^worker last: expected tokens below 50, got 50 \(step 9\)$"):
        check_result(answered([1, 1, 6], [4, 4, 4], token=50), ASKED, 50, "last")


EXACT, TOP = (CONDITIONING_EXACT, 2), (CONDITIONING_TOP, 3)  # rows
HIDDEN = 6


def soft_result(*soft: Soft, failed: int | None = None) -> Result:
    return Result(step=9, soft=soft, failures=[] if failed is None else [Failure(slot=failed)])


def softened(result: Result) -> None:
    check_soft(result, {1: EXACT, 4: TOP}, HIDDEN, DTYPE_BFLOAT16, 50, "last")


def test_what_comes_back_for_the_next_step_of_a_canvas_has_just_the_bytes_that_were_asked_for() -> None:
    exact = Soft(slot=1, conditioning=CONDITIONING_EXACT, rows=bytes(2 * HIDDEN * 2))
    top = Soft(slot=4, conditioning=CONDITIONING_TOP, rows=bytes(3 * 64 * 2), ids=bytes([49, 0, 0, 0]) * 3 * 64)
    softened(soft_result(exact, top))
    softened(soft_result(top, failed=1))
    odd = Soft(slot=4, conditioning=CONDITIONING_TOP, rows=top.rows, ids=bytes([50, 0, 0, 0]) * 3 * 64)
    with pytest.raises(FrameError, match=r"^worker last: expected tokens below 50, got 50 \(step 9\)$"):
        softened(soft_result(exact, odd))
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
