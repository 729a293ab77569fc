"""Which windows a slot takes."""

import pytest

from protos.brigade_pb2 import Cache, Sampling, Window
from worker.compute.slot import Slot
from worker.errors import CacheMismatch
from worker.memory.history import History
from worker.memory.slot_caches import Caches


@pytest.mark.parametrize(
    ("base", "num_tokens", "is_taken"),
    [(4, 4, True), (8, 8, True), (4, 0, True), (4, 3, False), (4, 5, False), (6, 4, False), (6, 2, False)],
)
def test_tokens_of_a_grid_are_taken_in_whole_blocks_only(base: int, num_tokens: int, is_taken: bool) -> None:
    """Blocks of 4, by a slot that holds 8 tokens; a refused window leaves all of them."""
    known = History(range(20, 28))
    slot = Slot(Caches((), (), Cache(), grid=4), History(known.tokens), Sampling())
    window = Window(slot=0, base=base, prefix_hash=known.prefix_hash(base), tokens=range(num_tokens), wanted=1)
    if is_taken:
        slot.begin(window)
    else:
        with pytest.raises(CacheMismatch, match="in whole blocks of 4"):
            slot.begin(window)
    assert slot.history.tokens == ([*known.tokens[:base], *range(num_tokens)] if is_taken else known.tokens)
