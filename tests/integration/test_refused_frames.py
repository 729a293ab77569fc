"""Frames and hops that a worker refuses, before it computes anything."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT32, DTYPE_UNSPECIFIED, Frame, Tensor, Timing
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, Pass
from tests.integration.flipped_bits import frame_of, recording, send_encrypted
from tests.integration.many import until
from tests.integration.upstream import D, feeding, frame, parts_of, tensor, window_of
from tools.proxy import Proxy
from worker.errors import FrameError
from worker.node.hop import Link
from worker.node.network import Network


async def test_a_closed_slot_takes_no_more_windows(folder: Path) -> None:
    async with feeding(folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(2, [8], before=(5, 6, 7), closed=[0]))
        with pytest.raises(FrameError, match=r"worker node-1: .*slot 0 is not open"):
            await worker.next_result()


# Frames and hops that are refused


def odd(tokens: Sequence[int] = (5, 6, 7), hidden: Tensor | None = None, **fields: Any) -> Frame:
    """A sound frame but for this."""
    found = frame(1, list(tokens))
    if hidden is not None:
        found.hidden.CopyFrom(hidden)
    for name, value in fields.items():
        found.ClearField(name)  # type: ignore[arg-type]
        found.MergeFrom(Frame(**{name: value}))
    return found


def wanting(num_rows: int, wanted: int) -> Frame:
    found = odd(range(num_rows))
    found.windows[0].wanted = wanted
    return found


def shaped(*shape: int, dtype: int = DTYPE_FLOAT32) -> tuple[Frame, int, str]:
    """Refused by the header alone: none of the bytes that it announces is sent."""
    name = {DTYPE_FLOAT32: "float32", DTYPE_BFLOAT16: "bfloat16", DTYPE_UNSPECIFIED: "unspecified"}.get(
        dtype, f".*{dtype}"
    )
    said = rf"expected hidden \[1, 3, 64\] float32 from stage 0, got {re.escape(str([*shape]))} {name} \(step 1\)"
    return odd(hidden=tensor(shape, dtype)), 0, said


REFUSED: dict[str, tuple[Frame, int | None, str]] = {
    "another width": shaped(1, 3, D // 2),
    "other rows": shaped(1, 2, D),
    "another rank": shaped(3, D),
    "more than there is memory": shaped(2**32 - 1, 2**32 - 1, 2**32 - 1),
    "another dtype": shaped(1, 3, D, dtype=DTYPE_BFLOAT16),
    "no dtype": shaped(1, 3, D, dtype=DTYPE_UNSPECIFIED),
    "an unknown dtype": shaped(1, 3, D, dtype=9),
    "no hidden states": shaped(dtype=DTYPE_UNSPECIFIED),
    **{f"{n} bytes": (odd(), n, rf"expected 768 bytes in part 0, got {n} \(step 1\)") for n in (0, 700, 769)},
    **{
        f"{n} timings": (odd(timings=[Timing()] * n), None, rf"expected 1 timings.*got {n} \(step 1\)") for n in (0, 2)
    },
    **{
        f"{n} rows of which {wanted} are wanted": (
            wanting(n, wanted), None, rf"expected at least {max(1, wanted)} tokens, got {n} .*slot 0 \(step 1\)",
        )
        for n, wanted in ((0, 0), (0, 1), (3, 4))
    },
    "two windows for a slot": (
        odd(windows=[window_of((5, 6), 0), window_of((5, 6, 7), 2)]), None,
        r"expected one window per slot, got slots \[0, 0\]",
    ),
    "another epoch": (odd(epoch=2), None, r"expected .*epoch 1, got epoch 2 \(step 1\)"),
}  # fmt: skip


@pytest.mark.parametrize(("refused", "num_bytes", "said"), REFUSED.values(), ids=REFUSED)
async def test_a_frame_that_is_not_as_it_should_be_is_refused_before_anything_is_computed(
    folder: Path, passes: list[Pass], refused: Frame, num_bytes: int | None, said: str
) -> None:
    async with feeding(folder) as worker:
        await worker.send(refused, num_bytes=num_bytes)
        with pytest.raises(FrameError, match=f"^worker node-1: {said}"):
            await worker.next_result()
        if "hidden" in said or "epoch" in said:
            with pytest.raises(FrameError, match=f"^worker node-1: {said}"):
                await worker.wait_refused()
    assert passes == []


async def test_a_long_frame_is_taken_only_whole(folder: Path, passes: list[Pass]) -> None:
    long = frame(1, list(range(90)) * 12)
    async with feeding(folder) as worker:
        await worker.send(long)
        assert len((await worker.next_result()).samples) == 1
        long.step = 2
        num_bytes = len(long.windows[0].tokens) * D * 4
        await worker.send_parts(parts_of(long, bytes(num_bytes // 2)))
        with pytest.raises(FrameError, match=f"^worker node-1: expected {num_bytes} bytes in part 0, got "):
            await worker.next_result()
    assert passes == [Pass(2, (1080,))]


@pytest.mark.parametrize(("epoch", "stage"), [(1, 1), (2, 0)])
async def test_a_hop_from_the_wrong_stage_or_epoch_is_refused(folder: Path, epoch: int, stage: int) -> None:
    message = rf"^worker node-1: expected a hop of .*'1', '0'.*got .*'{epoch}', '{stage}'"
    with pytest.raises(FrameError, match=message):
        async with feeding(folder, epoch, stage):
            pytest.fail("the hop was taken")


async def test_a_second_hop_from_the_same_stage_is_refused(folder: Path) -> None:
    """Two streams would not say whose frame comes first."""
    async with feeding(folder) as worker:
        other = worker.another_link()
        try:
            with pytest.raises(
                FrameError, match=r"^worker node-1: expected one hop from the stage before, got another"
            ):
                await other.wait_open()
        finally:
            await other.close()
        await worker.send(frame(1, [5, 6, 7]))
        assert len((await worker.next_result()).samples) == 1


# Frames that were changed, lost, repeated or reordered on the way


async def test_a_frame_with_a_flipped_bit_is_refused_uncomputed(folder: Path, passes: list[Pass]) -> None:
    """Any bit of any part: tests/unit/node/test_framing.py."""
    async with feeding(folder) as worker:
        [part] = parts_of(frame(1, [5, 6, 7]), bytes(3 * D * 4))
        flipped = bytearray(part)
        flipped[-300] ^= 16
        await worker.send_parts([bytes(flipped)])
        for refused in (worker.wait_refused(), worker.next_result()):
            with pytest.raises(FrameError, match=r"^worker node-1: expected a part of a frame as it was sent"):
                await refused
    assert passes == []


@pytest.mark.parametrize("step", [7, 6], ids=["again", "an earlier one"])
async def test_a_frame_that_comes_twice_or_too_late_is_refused(folder: Path, passes: list[Pass], step: int) -> None:
    async with feeding(folder) as worker:
        await worker.send(frame(7, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(step, [8], before=(5, 6, 7)))
        message = rf"^worker node-1: expected a step after 7, got step {step}$"
        for refused in (worker.wait_refused(), worker.next_result()):
            with pytest.raises(FrameError, match=message):
                await refused
    assert passes == [Pass(2, (3,))]


@pytest.mark.parametrize("count", [200, pytest.param(400, marks=pytest.mark.matrix)])
async def test_of_hundreds_of_encrypted_frames_with_a_flipped_bit_none_is_accepted(tmp_path: Path, count: int) -> None:
    certificates = Certificates(tmp_path)
    assert await send_encrypted(certificates.coordinator(), certificates.network("node-1"), count) == (count, 0)


async def test_a_frame_of_which_no_bit_is_flipped_is_accepted(tmp_path: Path) -> None:
    certificates, payload = Certificates(tmp_path), random.Random(3).randbytes(16_000_000)
    await assert_accepted(certificates.coordinator(), certificates.network("node-1"), payload)
    await assert_accepted(NETWORK, NETWORK, payload)


async def assert_accepted(sender: Network, receiver: Network, payload: bytes) -> None:
    async with recording(receiver) as (recorder, address), Proxy(address).serving() as proxy:
        link = Link(sender, "node-1", proxy.address, 1, 0)
        await link.send(frame_of(200, payload, sender.wire))
        await until(lambda: bool(recorder.arrived))
        await link.close()
    [arrival] = recorder.arrived
    assert b"".join(arrival.payload) == payload and len(arrival.payload) == 2
