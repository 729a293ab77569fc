"""Splits by bytes: the best one of all, what it accounts for, and how it is refused."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.planning.plan import Assignment, MemoryOffer, Node, Plan, budgets, require_fit
from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, DTYPE_BFLOAT16, Cache
from tests.unit.planning.test_planner import BLOCK, ROOMY, by_bytes, model, nodes
from worker.errors import ConfigError
from worker.model.cache_spec import Memory
from worker.model.model_spec import CanvasTraining, LayerSpec, ModelSpec
from worker.platform.text import format_bytes


def rows(per_token: int, window: int | None = None) -> Memory:
    """A cache of so many bytes per token."""
    return Memory(window, 1, per_token, 0, 1)


def all_splits(spec: ModelSpec, num_nodes: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, spec.num_layers), num_nodes - 1):
        bounds = (0, *cuts, spec.num_layers)
        yield [end - start for start, end in itertools.pairwise(bounds)]


def excess(candidate: Plan) -> tuple[float, float]:
    """Worst and summed shortage, relative to the budgets; added from the end, as floats add up differently."""
    parts = [max(0, a.needed_bytes - a.memory_bytes) / a.memory_bytes for a in candidate.assignments]
    return max(parts), sum(reversed(parts))


def size(candidate: Plan, spec: ModelSpec) -> tuple[int, int]:
    """What a token reads of the largest stage, then of all squared: everything but the embedding."""
    weights = [a.weight_bytes - (spec.embed_bytes if a.start == 0 else 0) for a in candidate.assignments]
    return max(weights), sum(weight**2 for weight in weights)


def brute_force(spec: ModelSpec, where: list[Node], context: int) -> Plan:
    """The best of all splits; the first in order of those that are equally good. If none fits, without the smallest."""
    candidates = [by_bytes(spec, where, context, layers) for layers in sorted(all_splits(spec, len(where)))]
    fitting = [candidate for candidate in candidates if candidate.fits]
    if fitting:
        return min(fitting, key=lambda candidate: size(candidate, spec))
    if len(where) > 1:
        smallest = min(where[1:], key=lambda node: node.memory_bytes)
        if (fewer := brute_force(spec, [node for node in where if node != smallest], context)).fits:
            return fewer
    return min(candidates, key=excess)


def random_case(seed: int) -> tuple[ModelSpec, list[Node], int]:
    """Sizes in blocks of rows, which is what a cache takes."""
    rng = random.Random(seed)
    layers = tuple(
        LayerSpec(
            BLOCK * rng.randint(1, 9),
            (
                rows(rng.randint(0, 2), rng.choice([None, 2])),
                Memory(state_arrays=1, state_bytes=BLOCK * rng.choice([0, 3])),
            ),
        )
        for _ in range(rng.randint(1, 8))
    )  # fmt: skip
    embed, head = BLOCK * rng.randint(0, 9), BLOCK * rng.randint(0, 9)
    spec = ModelSpec("tiny", "qwen3", layers, embed, head, False, 8, 16, 128, DTYPE_BFLOAT16)
    budgets = [BLOCK * rng.randint(5, 60) for _ in range(rng.randint(1, min(4, len(layers))))]
    return spec, nodes(*budgets), rng.choice([1, BLOCK, BLOCK + 1, 4 * BLOCK])


def test_the_plan_is_the_best_of_all_splits() -> None:
    num_fitting = num_over_fewer = 0
    for seed in range(100):
        case = random_case(seed)
        found = by_bytes(*case)
        assert found == brute_force(*case), seed
        num_fitting += found.fits
        num_over_fewer += len(found.names) < len(case[1])
    assert 20 < num_fitting < 80, "both those that fit and those that do not have to be tried"
    assert num_over_fewer >= 3, "and those that fit only without the smallest nodes"


def test_assignments_are_contiguous_and_account_for_every_byte() -> None:
    spec = model([5, 6, 7, 8], embed=3, head=4, per_token=2)
    found = by_bytes(spec, nodes(2000, 3000, 4000), context=300)
    assert found.assignments == (
        Assignment("n0", 0, 1, weight_bytes=3 + 5, cache_bytes=1024, memory_bytes=2000),
        Assignment("n1", 1, 3, weight_bytes=6 + 7, cache_bytes=2048, memory_bytes=3000),
        Assignment("n2", 3, 4, weight_bytes=8 + 4, cache_bytes=1024, memory_bytes=4000),
    )
    assert [a.needed_bytes for a in found.assignments] == [1032, 2061, 1036]
    assert found.context == 300


@pytest.mark.parametrize(
    ("context", "window", "budget", "layers"),
    [
        (1, None, 520, [2, 2]),
        (256, None, 520, [2, 2]),
        (257, None, 520, [1, 3]),
        (512, None, 520, [1, 3]),
        (5000, 1, 2056, [2, 2]),  # the rows of a sliding window, and those of a chunk to slide in
        (5000, 2, 2056, [1, 3]),
    ],
)
def test_the_cache_of_a_whole_context_counts(context: int, window: int | None, budget: int, layers: list[int]) -> None:
    assert by_bytes(model([2, 2, 2, 2], per_token=1, window=window), nodes(budget, ROOMY), context).layers == layers


def test_any_split_may_be_given_and_fits_to_the_last_byte_or_not() -> None:
    given = by_bytes(model([1] * 6), nodes(ROOMY, ROOMY), 1, layers=[5, 1])
    assert [(a.start, a.end) for a in given.assignments] == [(0, 5), (5, 6)]
    assert not by_bytes(model([1] * 6), nodes(3, 3), 1, layers=[4, 2]).fits
    assert [by_bytes(model([5, 5]), nodes(size), 1).fits for size in (10, 9)] == [True, False]
    lacking = by_bytes(model([10] * 12), nodes(0, 100), 1)
    assert (lacking.layers, lacking.fits) == ([1, 11], False), "a node without memory is no division by zero"
    large = by_bytes(model([2**30] * 80, embed=2**30, head=2**30), nodes(*[12 * 2**30] * 8), 4096)
    assert large.fits and max(large.layers) - min(large.layers) <= 2, "a real size takes no time to speak of"


@pytest.mark.parametrize("layers", [[6], [1, 2, 3], [], [6, 0], [-1, 7], [3, 2], [4, 3]], ids=str)
def test_given_layers_must_be_a_split_of_the_model(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"^layers: "):
        by_bytes(model([1] * 6), nodes(ROOMY, ROOMY), 1, layers)


def test_more_nodes_than_layers_and_a_context_of_no_tokens_are_refused() -> None:
    for layers in (None, [1, 1, 1]):
        with pytest.raises(ConfigError, match="found 3 nodes for 2 layers"):
            by_bytes(model([1, 1]), nodes(ROOMY, ROOMY, ROOMY), 1, layers)
    for context in (0, -8):
        with pytest.raises(ConfigError, match=r"^context: "):
            by_bytes(model([1, 1]), nodes(ROOMY), context)


def test_a_plan_that_does_not_fit_is_refused_with_what_is_missing_and_what_to_do() -> None:
    spec = model([2**30] * 6, embed=2**29, per_token=2**20)
    with pytest.raises(ConfigError) as caught:
        require_fit(by_bytes(spec, [Node("studio", 8 * 2**30), Node("mini", 2**30)], 512, [4, 2]), spec)
    assert str(caught.value).splitlines() == [
        "tiny with 512 tokens of context does not fit: mini lacks 2.0 GiB. "
        "Use more nodes, a quantised model, or a lower --context (of `brigade bench`: -p and -g).",
        "node    layers  weights    cache  scratch   needed   budget  missing",
        "studio  [0, 4)  4.5 GiB  2.0 GiB      0 B  6.5 GiB  8.0 GiB        -",
        "mini    [4, 6)  2.0 GiB  1.0 GiB      0 B  3.0 GiB  1.0 GiB  2.0 GiB",
    ]
    spec = model([1] * 6)
    require_fit(by_bytes(spec, nodes(3, 3), 1), spec)
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 2**20 - 1: "1.0 MiB", 5000 << 40: "5000.0 TiB"}
    sizes |= {int(1.2 * 2**30): "1.2 GiB", 2**40: "1.0 TiB"}
    assert {num_bytes: format_bytes(num_bytes) for num_bytes in sizes} == sizes


def test_a_smaller_cache_makes_a_plan_fit() -> None:
    """Of 2 layers with heads of 64 numbers in bfloat16: 8 bits and a scale and a bias per group, or fewer tokens."""
    full = ModelSpec(
        "tiny", "qwen3", (LayerSpec(0, (Memory(None, 1, 64, 64, 2),)),) * 2, 0, 0, False, 8, 16, 4096, DTYPE_BFLOAT16
    )
    int8 = replace(full, cache=Cache(kind=CACHE_INT8))
    rotating = replace(full, cache=Cache(kind=CACHE_ROTATING, size=100, keep=4))
    assert full.reserved_bytes(0, 2, 4000) == 2 * 256 * 4096
    assert int8.reserved_bytes(0, 2, 4000) == 2 * 256 * 4096 * (1 + 4 / 64) / 2
    assert rotating.reserved_bytes(0, 2, 4000) == 2 * 256 * 1280
    budget = [Node("n0", 1_200_000)]
    assert not by_bytes(full, budget, 4000).fits
    assert by_bytes(int8, budget, 4000).fits and by_bytes(rotating, budget, 4000).fits


def test_nodes_of_one_machine_share_what_it_offers_and_the_configuration_counts() -> None:
    elsewhere, here, configured = (
        MemoryOffer(70, None),
        MemoryOffer(999, None, is_here=True),
        MemoryOffer(999, 5, is_here=True),
    )
    assert list(budgets(MemoryOffer(90, None), [elsewhere, here, configured])) == [42, 70, 42, 5]
    assert list(budgets(MemoryOffer(90, 8), [MemoryOffer(70, 6)])) == [8, 6]
    assert list(budgets(MemoryOffer(90, 80), [here, here])) == [80, 5, 5]
    assert list(budgets(MemoryOffer(90, 100), [here])) == [100, 0], "more than there is was configured"


def test_the_head_of_a_canvas_takes_its_place_on_the_last_node_only() -> None:
    spec = replace(model([1] * 4), vocab_size=1 << 18, canvas=CanvasTraining(7, 256))
    plain = by_bytes(replace(spec, canvas=None), nodes(ROOMY, ROOMY), 64)
    found = by_bytes(spec, nodes(ROOMY, ROOMY), 64)
    more = [a.needed_bytes - b.needed_bytes for a, b in zip(found.assignments, plain.assignments, strict=True)]
    less = [
        b.cache_budget_bytes - a.cache_budget_bytes for a, b in zip(found.assignments, plain.assignments, strict=True)
    ]
    assert more == less == [0, 9 * 64 * (1 << 20)]
