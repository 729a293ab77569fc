"""Frames and hops that a worker refuses, before it computes anything."""

import pytest

from protos.brigade_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_UNSPECIFIED,
    Tensor,
    Timing,
)
from tests.integration.conftest import (
    NETWORK,
    Models,
    Pass,
    load,
    load_request,
    serving,
)
from tests.integration.upstream import D, feeding, frame, parts_of, tensor
from worker.errors import FrameError
from worker.node.hop import Link


async def test_a_closed_slot_takes_no_more_windows(models: Models) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(2, [8], before=(5, 6, 7), closed=[0]))
        with pytest.raises(FrameError, match=r"worker node-1: .*slot 0 is not open"):
            await worker.next_result()


# Frames and hops that are refused

REFUSED = {
    "another width": (tensor([1, 3, D // 2]), r"\[1, 3, 32\] float32"),
    "other rows": (tensor([1, 2, D]), r"\[1, 2, 64\] float32"),
    "another rank": (tensor([3, D]), r"\[3, 64\] float32"),
    "more than there is memory": (tensor([2**32 - 1] * 3), r"\[4294967295, 4294967295, 4294967295\] float32"),
    "another dtype": (tensor([1, 3, D], DTYPE_BFLOAT16), r"\[1, 3, 64\] bfloat16"),
    "no dtype": (tensor([1, 3, D], DTYPE_UNSPECIFIED), r"\[1, 3, 64\] unspecified"),
    "an unknown dtype": (tensor([1, 3, D], 9), r"\[1, 3, 64\] .*9"),
    "no hidden states": (Tensor(), r"\[\] unspecified"),
}


@pytest.mark.parametrize(("hidden", "found"), REFUSED.values(), ids=REFUSED)
async def test_hidden_states_of_another_shape_or_dtype_are_refused(
    models: Models, passes: list[Pass], hidden: Tensor, found: str
) -> None:
    """By the header alone: none of the bytes that it announces is sent."""
    async with feeding(models("qwen3").folder) as worker:
        odd = frame(1, [5, 6, 7])
        odd.hidden.CopyFrom(hidden)
        await worker.send(odd, num_bytes=0)
        message = rf"^worker node-1: expected hidden \[1, 3, 64\] float32 from stage 0, got {found} \(step 1\)"
        with pytest.raises(FrameError, match=message):
            await worker.next_result()
        with pytest.raises(FrameError, match=message):
            await worker.wait_refused()
    assert passes == []


@pytest.mark.parametrize("num_bytes", [0, 700, 769])
async def test_a_payload_that_is_not_as_long_as_its_header_says_is_refused(
    models: Models, passes: list[Pass], num_bytes: int
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]), num_bytes=num_bytes)
        expected = rf"^worker node-1: expected 768 bytes in part 0, got {num_bytes} \(step 1\)"
        with pytest.raises(FrameError, match=expected):
            await worker.next_result()
    assert passes == []


async def test_a_frame_of_several_parts_is_taken_only_whole_and_in_order(models: Models, passes: list[Pass]) -> None:
    """1,080 rows of 256 bytes are more than two parts take."""
    long = frame(1, list(range(90)) * 12)
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(long)
        assert len((await worker.next_result()).samples) == 1
        long.step = 2
        first, *_ = parts_of(long, bytes(len(long.windows[0].tokens) * D * 4))
        await worker.send_parts([first, first])
        with pytest.raises(FrameError, match=r"^worker node-1: expected a part .*wrong checksum$"):
            await worker.next_result()
    assert passes == [Pass(2, (1080,))]


@pytest.mark.parametrize("count", [0, 2])
async def test_a_frame_with_another_number_of_timings_than_stages_passed_is_refused(
    models: Models, passes: list[Pass], count: int
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        odd = frame(1, [5, 6, 7])
        del odd.timings[:]
        odd.timings.extend([Timing()] * count)
        await worker.send(odd)
        with pytest.raises(FrameError, match=rf"^worker node-1: expected 1 timings.*got {count} \(step 1\)"):
            await worker.next_result()
    assert passes == []


@pytest.mark.parametrize(("rows", "wanted"), [(0, 0), (0, 1), (3, 4)])
async def test_a_window_without_rows_or_with_fewer_than_it_wants_is_refused(
    models: Models, passes: list[Pass], rows: int, wanted: int
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        odd = frame(1, list(range(rows)))
        odd.windows[0].wanted = wanted
        await worker.send(odd)
        expected = rf"^worker node-1: expected at least {max(1, wanted)} tokens, got {rows} .*slot 0 \(step 1\)"
        with pytest.raises(FrameError, match=expected):
            await worker.next_result()
    assert passes == []


async def test_a_frame_of_another_epoch_is_refused(models: Models, passes: list[Pass]) -> None:
    async with feeding(models("qwen3").folder) as worker:
        stale = frame(7, [5, 6, 7])
        stale.epoch = 2
        await worker.send(stale)
        for refused in (worker.wait_refused(), worker.next_result()):
            with pytest.raises(FrameError, match=r"^worker node-1: expected .*epoch 1, got epoch 2 \(step 7\)"):
                await refused
    assert passes == []


@pytest.mark.parametrize(("epoch", "stage"), [(1, 1), (1, 5), (2, 0), (0, 0)])
async def test_a_hop_from_the_wrong_stage_or_epoch_is_refused(models: Models, epoch: int, stage: int) -> None:
    message = rf"^worker node-1: expected a hop of .*'1', '0'.*got .*'{epoch}', '{stage}'"
    with pytest.raises(FrameError, match=message):
        async with feeding(models("qwen3").folder, epoch, stage):
            pytest.fail("the hop was taken")


async def test_a_hop_into_a_node_that_is_not_attached_is_refused(models: Models) -> None:
    async with serving(1) as [node]:
        await load(node, load_request(models("qwen3").folder, 2, 4))
        link = Link(NETWORK, node.name, node.address, 1, 0)
        try:
            with pytest.raises(FrameError, match=r"^worker node-1: is not part of a chain"):
                await link.wait_open()
        finally:
            await link.close()


async def test_a_second_hop_from_the_same_stage_is_refused(models: Models) -> None:
    """Two streams would not say whose frame comes first."""
    async with feeding(models("qwen3").folder) as worker:
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


@pytest.mark.parametrize("at", [3, 40, -300, -3], ids=["length", "header", "hidden states", "checksum"])
async def test_a_frame_with_a_flipped_bit_is_refused_before_anything_is_computed(
    models: Models, passes: list[Pass], at: int
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        [part] = parts_of(frame(1, [5, 6, 7]), bytes(3 * D * 4))
        flipped = bytearray(part)
        flipped[at] ^= 16
        await worker.send_parts([bytes(flipped)])
        for refused in (worker.wait_refused(), worker.next_result()):
            with pytest.raises(FrameError, match=r"^worker node-1: expected a part of a frame as it was sent"):
                await refused
    assert passes == []


@pytest.mark.parametrize("step", [7, 6], ids=["again", "an earlier one"])
async def test_a_frame_that_comes_twice_or_too_late_is_refused(models: Models, passes: list[Pass], step: int) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(7, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(step, [8], before=(5, 6, 7)))
        message = rf"^worker node-1: expected a step after 7, got step {step}$"
        for refused in (worker.wait_refused(), worker.next_result()):
            with pytest.raises(FrameError, match=message):
                await refused
    assert passes == [Pass(2, (3,))]
