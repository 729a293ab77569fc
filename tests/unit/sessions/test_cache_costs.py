"""A plan and admission go by the same figure: what is said to fit is let in after loading."""

import pytest

from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.sessions.admission import Slots, cache_costs
from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, DTYPE_BFLOAT16, Cache
from tests.unit.fake_chain import make_session
from worker.errors import InputError
from worker.model.cache_spec import Memory
from worker.model.model_spec import LayerSpec, ModelSpec

MIB = 2**20
ROW = 2 * 8 * 128 * 2  # keys and values of 8 heads of 128 numbers in bfloat16
FULL, INT8, ROTATING = Cache(), Cache(kind=CACHE_INT8), Cache(kind=CACHE_ROTATING, size=1000, keep=4)
WHOLE = LayerSpec(7, (Memory(None, 8, 128, 128, 2),))
SLIDING = LayerSpec(7, (Memory(512, 8, 128, 128, 2),))
RECURRENT = LayerSpec(7, (Memory(state_arrays=2, state_bytes=5 * MIB),))


@pytest.mark.parametrize(
    ("layers", "cache", "context", "mib"),
    [
        ((WHOLE,) * 36, FULL, 2048, 288),
        ((WHOLE,) * 36, FULL, 2100, 576),  # a capacity is a power of two of blocks
        ((WHOLE,) * 36, FULL, 4097, 720),  # beyond 4,096 rows it grows by an eighth of the next power of two
        ((WHOLE,) * 36, INT8, 2100, 36 * 2304 * (2048 + 128) / MIB),  # never packed
        ((WHOLE,) * 36, ROTATING, 2100, 36 * 2048 * ROW / MIB),
        ((WHOLE, *[SLIDING] * 5) * 6, FULL, 2100, (6 * 4096 + 30 * 1536) * ROW / MIB),
        ((WHOLE, *[RECURRENT] * 3) * 9, FULL, 2100, 9 * 4096 * ROW / MIB + 27 * 2 * 5),
    ],
)
def test_what_a_plan_says_fits_is_let_in_and_nothing_else(
    layers: tuple[LayerSpec, ...], cache: Cache, context: int, mib: float
) -> None:
    spec = ModelSpec("tiny", "qwen3", layers, 0, 0, False, 64, 99, 8192, DTYPE_BFLOAT16, cache=cache)
    weights, needed = 36 * 7, round(mib * MIB)
    for budget in (weights + needed, weights + needed - 1):
        found = plan(spec, [Node("mini", budget)], NO_SPEEDS, Objective(context))
        assert found.assignments[0].cache_bytes == needed
        slots = Slots(cache_costs(found, spec))
        session = make_session([1] * (context - 10), 10, cache=cache)
        if found.fits:
            slots.add(session)
            assert slots.promised == (needed,)
        else:
            with pytest.raises(InputError, match="of cache on mini"):
                slots.add(session)
    assert not found.fits
