"""The fastest plan: what it chooses by tables, and that no other chain is faster by trying all of them."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from coordinator.planning.fastest import Aim, best_plan, fastest
from coordinator.planning.plan import Node, Plan, plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import Link, Speed, Survey
from protos.brigade_pb2 import DTYPE_BFLOAT16
from worker.model.cachespec import Memory
from worker.model.modelspec import LayerSpec, ModelSpec

BLOCK = 256
GB = 10**9
ROOMY = 10**15


def model(weights: Sequence[int], head: int = 0, embed: int = 0, per_token: int = 0, hidden: int = 5120) -> ModelSpec:
    layers = tuple(LayerSpec(weight, (Memory(None, 1, per_token, 0, 1),)) for weight in weights)
    return ModelSpec("tiny", "qwen3", layers, embed, head, False, hidden, 16, 4096, DTYPE_BFLOAT16)


def surveyed(spec: ModelSpec, *gbps: float, ports: Sequence[Link] = ()) -> Survey:
    """Nodes n0, n1, ... that read so many GB/s; `ports` are those of the workers."""
    speeds = {f"n{i}": Speed.assumed(spec, each) for i, each in enumerate(gbps)}
    return Survey(speeds, {f"n{i}": port for i, port in enumerate(ports, 1)})


def nodes(*budgets: int) -> list[Node]:
    return [Node(f"n{i}", budget) for i, budget in enumerate(budgets)]


def names(found: Plan) -> list[str]:
    return [assignment.name for assignment in found.assignments]


# A model of 64 layers of 0.215 GB, the head 0.715 GB; a Mac that reads 546 GB/s and one that reads 120.
SEED_MODEL = model([215_000_000] * 64, head=715_000_000)
SEED_SPEEDS = (546, 120)
ROOM_FOR_53 = 53 * 215_000_000 + 100_000_000


def test_the_faster_mac_gets_what_it_has_room_for() -> None:
    survey = surveyed(SEED_MODEL, *SEED_SPEEDS, ports=[Link(rtt_ms=0.3, bytes_per_s=20e9 / 8)])
    where = nodes(ROOM_FOR_53, 24 * 2**30)
    found = fastest(SEED_MODEL, where, survey, Aim(1))
    assert found is not None and found.fits and found.layers == [53, 11]
    chosen, by_bytes = (Prediction(SEED_MODEL, each, survey) for each in (found, plan(SEED_MODEL, where, 1)))
    assert plan(SEED_MODEL, nodes(ROOMY, ROOMY), 1).layers == [34, 30]
    assert chosen.ms_per_token == pytest.approx(47, abs=0.5)
    assert by_bytes.ms_per_token == pytest.approx(73, abs=0.6)
    assert chosen.hop_ms == pytest.approx([0.154, 0.15], abs=0.001)


def test_with_room_enough_the_fastest_mac_does_it_alone() -> None:
    survey = surveyed(SEED_MODEL, *SEED_SPEEDS)
    found = fastest(SEED_MODEL, nodes(ROOMY, ROOMY), survey, Aim(1))
    assert found is not None and (names(found), found.layers) == (["n0"], [64])
    assert Prediction(SEED_MODEL, found, survey).ms_per_token == pytest.approx((64 * 215 + 715) / 546)


def test_for_throughput_both_are_kept_at_work() -> None:
    """Without a head: 53 layers of the one take as long as 11.6 of the other."""
    spec = model([215_000_000] * 64)
    survey = surveyed(spec, *SEED_SPEEDS)
    found = fastest(spec, nodes(ROOMY, ROOMY), survey, Aim(1, objective="throughput", num_requests=8))
    assert found is not None and found.layers == [53, 11]
    assert Prediction(spec, found, survey).tokens_per_s(8) == pytest.approx(1e3 / (53 * 215 / 546))


@pytest.mark.parametrize(
    ("gbps", "gb", "ports", "objective", "expected"),
    [
        pytest.param((100, 200, 400), (40, 40, 40), (), "latency", [("n0", 1), ("n2", 9)], id="as little as it must"),
        pytest.param((100, 200, 400), (40, 40, 4), (), "latency", [("n0", 1), ("n1", 5), ("n2", 4)], id="memory-bound"),
        pytest.param((400, 200, 100), (4, 4, 4), (), "latency", [("n0", 4), ("n1", 4), ("n2", 2)], id="fastest filled"),
        pytest.param((400, 100, 200), (4, 4, 4), (), "latency", [("n0", 4), ("n1", 2), ("n2", 4)], id="whatever order"),
        pytest.param((400, 300, 300), (6, 6, 6), (Link(9), Link(1)), "latency", [("n0", 6), ("n2", 4)], id="a link"),
        pytest.param((100, 900), (40, 40), (Link(200),), "latency", [("n0", 10)], id="a faster one, too far away"),
        pytest.param((100, 200, 400), (40,) * 3, (), "throughput", [("n0", 1), ("n1", 3), ("n2", 6)], id="all at work"),
        pytest.param(
            (400, 400, 400), (40,) * 3, (Link(0, 125e6), Link(0, 5e9)), "throughput", [("n0", 5), ("n2", 5)],
            id="a link that takes longer than what it saves",
        ),
    ],
)  # fmt: skip
def test_unequal_macs(
    gbps: tuple[float, ...],
    gb: tuple[int, ...],
    ports: tuple[Link, ...],
    objective: str,
    expected: list[tuple[str, int]],
) -> None:
    """Ten layers of 1 GB; 10 million numbers per row make links count."""
    spec = model([GB] * 10, hidden=10**6)
    aim = Aim(1, objective=objective, num_requests=8)  # type: ignore[arg-type]
    found = fastest(spec, nodes(*(size * GB for size in gb)), surveyed(spec, *gbps, ports=ports), aim)
    assert found is not None and sorted(zip(names(found), found.layers, strict=True)) == expected


def test_a_tiny_model_stays_where_it_is() -> None:
    spec = model([1000, 1000])
    ports = [Link(rtt_ms=0.1)]
    for objective in ("latency", "throughput"):
        aim = Aim(1, objective=objective)  # type: ignore[arg-type]
        found = fastest(spec, nodes(ROOMY, ROOMY), surveyed(spec, 100, 100, ports=ports), aim)
        assert found is not None and names(found) == ["n0"]


def test_memory_is_that_of_all_sessions() -> None:
    spec = model([GB] * 4, per_token=1000)
    survey = surveyed(spec, 400, 100)
    room = 3 * GB + 3 * 1000 * 1024  # three layers' weights, and their caches of one session
    for num_sessions, layers in ((1, [3, 1]), (2, [2, 2])):
        found = fastest(spec, nodes(room, ROOMY), survey, Aim(1024, num_sessions))
        assert found is not None and found.fits and found.layers == layers
        assert found.num_sessions == num_sessions


def test_the_given_order_is_kept_where_it_is_fixed() -> None:
    """The last node is slow at the head, which only it would have."""
    spec = model([GB] * 4, head=8 * GB)
    survey = surveyed(spec, 100, 800, 50)
    where = nodes(GB, 10 * GB, 20 * GB)
    free, fixed = (fastest(spec, where, survey, Aim(1, is_order_fixed=is_fixed)) for is_fixed in (False, True))
    assert free is not None and names(free) == ["n0", "n2", "n1"]
    assert fixed is not None and names(fixed) == ["n0", "n1", "n2"]


def test_without_all_speeds_the_split_is_by_bytes() -> None:
    where = nodes(ROOMY, ROOMY)
    assert best_plan(SEED_MODEL, where, surveyed(SEED_MODEL, 546), Aim(1)) == plan(SEED_MODEL, where, 1)


def test_what_fits_nowhere_is_the_plan_that_lacks_least() -> None:
    where = nodes(GB, GB)
    found = best_plan(SEED_MODEL, where, surveyed(SEED_MODEL, 546, 120), Aim(1))
    assert not found.fits and found == plan(SEED_MODEL, where, 1)


def test_given_layers_are_taken_as_they_are() -> None:
    found = best_plan(SEED_MODEL, nodes(ROOMY, ROOMY), surveyed(SEED_MODEL, 546, 120), Aim(1), [10, 54])
    assert found.layers == [10, 54]


def random_case(seed: int) -> tuple[ModelSpec, list[Node], Survey, Aim]:
    """Speeds that fall and rise with rows, links of any kind, budgets that often bind."""
    rng = random.Random(seed)
    spec = model([BLOCK * rng.choice([1, 3]) for _ in range(rng.randint(1, 6))], BLOCK * rng.randint(0, 4), per_token=1)

    def times() -> tuple[tuple[int, float], ...]:
        first, more = rng.randint(1, 40), rng.randint(0, 9)
        return tuple((rows, first + more * (rows - 1) / 4) for rows in (1, 2, 4, 8))

    where = nodes(*(BLOCK * rng.randint(2, 30) for _ in range(rng.randint(1, 4))))
    speeds = {node.name: Speed(tuple(times() for _ in spec.kinds), times(), rng.choice([1, 1e-6])) for node in where}
    ports = {node.name: Link(rng.choice([0, 4, 30]), rng.choice([1e6, 1e7, 1e9])) for node in where[1:]}
    links = {("n1", "n2"): Link(rng.choice([0, 100]))} if rng.random() < 0.5 else {}
    objective = rng.choice(["latency", "throughput"])
    aim = Aim(1, rng.choice([1, 3]), objective, rng.choice([2, 5, 8]), rng.random() < 0.3)  # type: ignore[arg-type]
    return spec, where, Survey(speeds, ports, links), aim


def all_chains(spec: ModelSpec, where: list[Node], aim: Aim) -> Iterator[Plan]:
    """Every choice of workers, in every order that is allowed, with every split that fits."""
    for count in range(len(where)):
        for others in itertools.permutations(where[1:], count):
            if aim.is_order_fixed and list(others) != sorted(others, key=where.index):
                continue
            for cuts in itertools.combinations(range(1, spec.num_layers), count):
                layers = [end - start for start, end in itertools.pairwise((0, *cuts, spec.num_layers))]
                found = plan(spec, [where[0], *others], aim.context, layers, aim.num_sessions)
                if found.fits:
                    yield found


def time_of(found: Plan, spec: ModelSpec, survey: Survey, aim: Aim) -> float:
    prediction = Prediction(spec, found, survey)
    rate = prediction.tokens_per_s(1 if aim.objective == "latency" else aim.num_requests)
    assert rate is not None
    return 1 / rate


@pytest.mark.parametrize("seed", range(150))
def test_no_other_chain_is_faster(seed: int) -> None:
    spec, where, survey, aim = random_case(seed)
    times = [time_of(each, spec, survey, aim) for each in all_chains(spec, where, aim)]
    found = fastest(spec, where, survey, aim)
    if found is None:
        assert not times
    else:
        assert found.fits and time_of(found, spec, survey, aim) == pytest.approx(min(times))


def test_the_random_cases_are_of_all_kinds() -> None:
    found = [fastest(*random_case(seed)) for seed in range(150)]
    num_nodes = [len(each.assignments) if each else 0 for each in found]
    assert min(num_nodes.count(count) for count in (0, 1, 2, 3)) >= 5


def test_a_large_cluster_takes_no_time_to_speak_of() -> None:
    spec = model([GB] * 100, head=GB)
    survey = surveyed(spec, 546, 120, 400, 273, 819, 120, 273, 546, ports=[Link(0.3, 2e9)] * 7)
    for objective in ("latency", "throughput"):
        aim = Aim(4096, objective=objective)  # type: ignore[arg-type]
        assert fastest(spec, nodes(*[24 * GB] * 8), survey, aim) is not None
