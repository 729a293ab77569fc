"""Frames and hops that a worker refuses, before it computes anything."""

import pytest

from protos.brigade_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_UNSPECIFIED,
    Tensor,
)
from protos.brigade_pb2 import Session as Opening
from tests.integration.conftest import (
    Models,
    Pass,
    load,
    load_request,
    serving,
)
from tests.integration.upstream import D, feeding, frame, tensor
from worker.errors import CacheMismatch, FrameError
from worker.node.link import Link


async def test_a_wrong_prefix_hash_is_refused_before_anything_is_computed(models: Models, passes: list[Pass]) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        assert len((await worker.next_result()).samples) == 1
        assert passes == [Pass(2, (3,))]
        await worker.send(frame(2, [8], before=(5, 6, 9)))
        with pytest.raises(
            CacheMismatch, match=r"worker node-1: .*slot 0 was to continue at 3 tokens .*another prefix"
        ):
            await worker.next_result()
        assert passes == [Pass(2, (3,))]


async def test_a_slot_that_lacks_the_prefix_is_refused_before_anything_is_computed(
    models: Models, passes: list[Pass]
) -> None:
    """A restarted worker never goes on from an empty cache."""
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [8], before=(5, 6, 9), opened=[Opening(slot=0)]))
        with pytest.raises(CacheMismatch, match=r"worker node-1: .*slot 0 was to continue at 3 tokens .*only 0 tokens"):
            await worker.next_result()
    assert passes == []


async def test_a_slot_opened_again_starts_empty(models: Models) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(2, [8], before=(5, 6, 7), opened=[Opening(slot=0)]))
        with pytest.raises(CacheMismatch, match="only 0 tokens"):
            await worker.next_result()


async def test_a_closed_slot_takes_no_more_windows(models: Models) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(2, [8], before=(5, 6, 7), closed=[0]))
        with pytest.raises(FrameError, match=r"worker node-1: .*slot 0 is not open"):
            await worker.next_result()


# Frames and hops that are refused

REFUSED = {
    "another width": (
        tensor([1, 3, D // 2]),
        r"\[1, 3, 64\] float32 from stage 0, got \[1, 3, 32\] float32 \(step 1\)",
    ),
    "other rows": (tensor([1, 2, D]), r"\[1, 3, 64\] float32 from stage 0, got \[1, 2, 64\] float32 \(step 1\)"),
    "another rank": (tensor([3, D]), r"\[1, 3, 64\] float32 from stage 0, got \[3, 64\] float32 \(step 1\)"),
    "another dtype": (
        tensor([1, 3, D], DTYPE_BFLOAT16),
        r"\[1, 3, 64\] float32 from stage 0, got \[1, 3, 64\] bfloat16 \(step 1\)",
    ),
    "no dtype": (
        tensor([1, 3, D], DTYPE_UNSPECIFIED),
        r"float32 from stage 0, got \[1, 3, 64\] unspecified \(step 1\)",
    ),
    "an unknown dtype": (tensor([1, 3, D], 9), r"float32 from stage 0, got \[1, 3, 64\] .*9 \(step 1\)"),
    "no hidden states": (Tensor(), r"\[1, 3, 64\] float32 from stage 0, got \[\] unspecified \(step 1\)"),
    "bytes missing": (tensor([1, 3, D], num_bytes=700), r"768 bytes for \[1, 3, 64\], got 700"),
    "bytes to spare": (tensor([1, 3, D], num_bytes=769), r"768 bytes for \[1, 3, 64\], got 769"),
}


@pytest.mark.parametrize(("hidden", "message"), REFUSED.values(), ids=REFUSED)
async def test_hidden_states_of_another_shape_or_dtype_are_refused(
    models: Models, passes: list[Pass], hidden: Tensor, message: str
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        odd = frame(1, [5, 6, 7])
        odd.hidden.CopyFrom(hidden)
        await worker.send(odd)
        with pytest.raises(FrameError, match=f"^worker node-1: expected .*{message}"):
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
        with pytest.raises(FrameError, match=r"^worker node-1: expected .*epoch 1, got epoch 2 \(step 7\)"):
            await worker.wait_refused()
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
        link = Link(node.name, node.address, 1, 0)
        try:
            with pytest.raises(FrameError, match=r"^worker node-1: is not part of a chain"):
                await link.wait_open()
        finally:
            await link.close()
