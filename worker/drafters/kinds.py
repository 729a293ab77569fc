"""The kinds of drafters: what a node loads for one, and how it drafts with that."""

from __future__ import annotations

import mlx.core as mx

from worker.compute.drafting import Drafter
from worker.compute.shard import Shard
from worker.drafters.dflash import DFlashDrafter, DFlashModule
from worker.drafters.draft_head import HeadDrafter, HeadModule, HeadPart
from worker.drafters.next_token import EagleDrafter, EagleModule, MtpDrafter, MtpModule
from worker.drafters.small_model import SmallModel
from worker.errors import FrameError
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.model.draft_heads import check_head
from worker.model.model_spec import HeadKind

_HEADS: dict[HeadKind, tuple[type[HeadModule], type[HeadDrafter]]] = {
    HeadKind.MTP: (MtpModule, MtpDrafter),
    HeadKind.DFLASH: (DFlashModule, DFlashDrafter),
    HeadKind.EAGLE3: (EagleModule, EagleDrafter),
}

DrafterPart = Shard | HeadPart  # a small model is a shard of all its layers


def build_part(checkpoint: Checkpoint, start: int, end: int, held: dict[str, mx.array] | None) -> DrafterPart:
    """Build layers [start, end) of a model, or a draft head with `end` layers; unread until `materialise`.

    Raises:
        ModelError: as `Shard` and `HeadPart`.
    """
    if head := describe(checkpoint).head:
        return HeadPart(checkpoint, _HEADS[head.kind][0], end, held)
    return Shard(checkpoint, start, end, held)


def prepare_drafting(shard: Shard, part: DrafterPart | None, num_features: int) -> Drafter | None:
    """Prepare a stage for drafting, on the MLX thread.

    Args:
        part: what the stage holds of the drafter.
        num_features: numbers that rows carry for a draft head, which reads some of the shard's layers.
    Returns:
        What drafts on the stage that samples; None on another one, and without a drafter.
    Raises:
        ModelError: the draft head does not fit the model. FrameError: `num_features` is not the head's.
    """
    if isinstance(part, HeadPart):
        check_head(part.spec, part.name, shard.info)
        if num_features != part.spec.num_features:
            raise FrameError(f"{part.name}: num_features: expected {part.spec.num_features}, found {num_features}")
    shard.tap(part.taps(shard) if isinstance(part, HeadPart) else {}, num_features)
    return make_drafter(part, shard) if part else None


def make_drafter(part: DrafterPart, shard: Shard) -> Drafter | None:
    """Return what drafts with this part for the model whose last layers the shard holds. Args as `prepare_drafting`."""
    if isinstance(part, Shard):
        return SmallModel(part, shard.info.vocab_size, shard.mask_token)
    return _HEADS[part.spec.kind][1](part, shard) if part.is_whole else None
