import random

import pytest

from coordinator.planning.contexts import Contexts, plan_largest
from coordinator.planning.plan import Node, plan
from protos.brigade_pb2 import DTYPE_BFLOAT16
from worker.model.cachespec import Memory
from worker.model.modelspec import LayerSpec, ModelSpec

BLOCK = 256
LONGEST = 16 * BLOCK


def random_model(rng: random.Random) -> ModelSpec:
    layers = tuple(
        LayerSpec(BLOCK * rng.randint(1, 9), (Memory(rng.choice([None, None, BLOCK]), 1, rng.randint(0, 3), 0, 1),))
        for _ in range(rng.randint(3, 8))
    )
    sizes = {"hidden_size": 8, "vocab_size": 16, "context": LONGEST}
    return ModelSpec(
        "tiny", "qwen3", layers, BLOCK * rng.randint(0, 9), BLOCK * rng.randint(0, 9), rng.random() < 0.5,
        dtype=DTYPE_BFLOAT16, **sizes,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_context_is_the_one_that_trying_all_of_them_finds(seed: int) -> None:
    rng = random.Random(seed)
    spec = random_model(rng)
    nodes = [Node(f"n{place}", BLOCK * rng.randint(10, 90)) for place in range(rng.randint(1, 3))]
    fitting = [context for context in range(BLOCK, LONGEST + 1, BLOCK) if plan(spec, nodes, context).fits]
    found = plan_largest(spec, nodes, Contexts(BLOCK, LONGEST))
    assert found.context == max(fitting, default=BLOCK)
    assert found == plan(spec, nodes, found.context)


def test_a_given_split_has_its_own_largest_context() -> None:
    layers = tuple(LayerSpec(0, (Memory(None, 1, 1, 0, 1),)) for _ in range(4))
    spec = ModelSpec("tiny", "qwen3", layers, 0, 0, False, 8, 16, LONGEST, DTYPE_BFLOAT16)
    nodes = [Node("big", 12 * BLOCK), Node("small", 4 * BLOCK)]
    assert plan_largest(spec, nodes, Contexts(BLOCK, LONGEST)).context == 4 * BLOCK
    assert plan_largest(spec, nodes, Contexts(BLOCK, LONGEST), [2, 2]).context == 2 * BLOCK


def test_a_context_that_somebody_chose_is_kept_whether_it_fits_or_not() -> None:
    spec = random_model(random.Random(1))
    assert plan_largest(spec, [Node("tiny", 1)], Contexts(700, 700)) == plan(spec, [Node("tiny", 1)], 700)
