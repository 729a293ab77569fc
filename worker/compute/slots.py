"""The slots of a stage, by number: frames open and close them."""

from __future__ import annotations

from collections.abc import Sequence

from protos.brigade_pb2 import Frame, Opening, Sampling
from worker.compute.grammar import Guide
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.compute.step import Step
from worker.errors import CacheMismatch, FrameError, SamplingError
from worker.memory.history import History
from worker.memory.slot_caches import Caches, close_all


def open_and_close(slots: dict[int, Slot], step: Step, shard: Shard, *, has_drafter: bool, returns_rows: bool) -> None:
    """Make the slots that the step's frame opens, and free those that it closes or whose places these take.

    Args:
        has_drafter: a drafter here reads what drafted slots are fed.
        returns_rows: one on another node does.
    Raises:
        FrameError: a slot copies one that is not open.
    """
    frame, fresh = step.frame, dict[int, Slot]()
    bases = {window.slot: window.base for window in frame.windows}
    for opening in frame.opened:
        is_drafted = opening.drafted and has_drafter
        slot = _opened(slots, step, shard, opening, bases.get(opening.slot, 0), is_drafted=is_drafted)
        slot.is_drafted = is_drafted
        slot.returns_rows = opening.drafted and returns_rows
        fresh[opening.slot] = slot
    ended = [slots.pop(number, None) for number in (*frame.closed, *fresh)]
    _close([slot for slot in ended if slot], kept=[slot.caches for slot in fresh.values()])
    slots.update(fresh)


def close_slots(slots: dict[int, Slot]) -> None:
    """Free the slots and remove them."""
    ended = list(slots.values())
    slots.clear()
    _close(ended)


def _opened(
    slots: dict[int, Slot], step: Step, shard: Shard, opening: Opening, length: int, *, is_drafted: bool
) -> Slot:
    """Return the new slot. On failure it is empty, so that later windows of the session fail too."""
    try:
        if opening.HasField("fork_of"):
            return _fork(slots, step.frame, shard, opening, length, is_drafted=is_drafted)
        return Slot(shard.make_caches(opening.cache), History(), opening.sampling, _guide(shard, opening.sampling))
    except (CacheMismatch, SamplingError) as error:
        step.fail(opening.slot, error)
        return Slot(shard.make_caches(opening.cache), History(), Sampling())


def _fork(
    slots: dict[int, Slot], frame: Frame, shard: Shard, opening: Opening, length: int, *, is_drafted: bool
) -> Slot:
    """Return a slot that continues from the first `length` tokens of another one, or takes that one's place."""
    source = slots.get(opening.fork_of)
    if source is None:
        raise FrameError(f"slot {opening.fork_of}, to be copied to slot {opening.slot}, is not open")
    if length > (held := len(source.history)):
        raise CacheMismatch(f"expected {length} tokens to copy from slot {opening.fork_of}, but it holds only {held}")
    copies = [each.slot for each in frame.opened if each.HasField("fork_of") and each.fork_of == opening.fork_of]
    return source.fork(
        *(length, opening.sampling, _guide(shard, opening.sampling)),
        snapshots=opening.snapshots,
        is_drafted=is_drafted,
        takes_over=copies == [opening.fork_of],
    )


def _guide(shard: Shard, sampling: Sampling) -> Guide | None:
    has_grammar = shard.is_last and sampling.HasField("grammar")
    return shard.grammars.guide(sampling.grammar) if has_grammar else None


def _close(slots: Sequence[Slot], kept: Sequence[Caches] = ()) -> None:
    """Free the slots, but not those caches that other slots have taken over."""
    close_all([slot.caches for slot in slots if slot.caches not in kept])
    for slot in slots:
        if slot.drafting:
            slot.drafting.close()
