"""The planner: plans by tables, and no other chain is better where all of them are tried."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from coordinator.planning.plan import Goal, Node, Objective, Plan
from coordinator.planning.planner import LATENCY_SLACK, PROMPT_ROWS, Planner, plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import NO_SPEEDS, UNMEASURED, LinkSpeed, NodeSpeed, Survey
from protos.brigade_pb2 import DTYPE_BFLOAT16
from worker.model.cache_spec import Memory
from worker.model.model_spec import CanvasTraining, LayerSpec, ModelSpec, Refinement

BLOCK = 256
GB = 10**9
ROOMY = 10**15
GOALS: tuple[Goal, ...] = ("latency", "throughput")


def model(
    weights: Sequence[int],
    head: int = 0,
    embed: int = 0,
    per_token: int = 0,
    hidden: int = 5120,
    window: int | None = None,
) -> ModelSpec:
    """A model whose caches take so many bytes per token and layer."""
    layers = tuple(LayerSpec(weight, (Memory(window, 1, per_token, 0, 1),)) for weight in weights)
    return ModelSpec("tiny", "qwen3", layers, embed, head, False, hidden, 16, 4096, DTYPE_BFLOAT16)


def surveyed(spec: ModelSpec, *gbps: float, ports: Sequence[LinkSpeed] = ()) -> Survey:
    """Nodes n0, n1, ... that read so many GB/s; `ports` are those of the workers."""
    speeds = {f"n{i}": NodeSpeed.assumed(spec, each) for i, each in enumerate(gbps)}
    return Survey(speeds, {f"n{i}": port for i, port in enumerate(ports, 1)})


def nodes(*budgets: int) -> list[Node]:
    return [Node(f"n{i}", budget) for i, budget in enumerate(budgets)]


def by_bytes(spec: ModelSpec, where: Sequence[Node], context: int, layers: Sequence[int] | None = None) -> Plan:
    return plan(spec, where, NO_SPEEDS, Objective(context, layers=layers))


def names(found: Plan) -> list[str]:
    return [assignment.name for assignment in found.assignments]


# A model of 64 layers of 0.215 GB, the head 0.715 GB; a Mac that reads 546 GB/s and one that reads 120.
SEED_MODEL = model([215_000_000] * 64, head=715_000_000)
SEED_SPEEDS = (546, 120)
ROOM_FOR_53 = 53 * 215_000_000 + 100_000_000

SPEC = model([GB] * 4, per_token=1000)
SURVEY = surveyed(SPEC, 400, 100, 200)


def test_the_faster_mac_gets_what_it_has_room_for() -> None:
    survey = surveyed(SEED_MODEL, *SEED_SPEEDS, ports=[LinkSpeed(rtt_ms=0.3, bytes_per_s=20e9 / 8)])
    where = nodes(ROOM_FOR_53, 24 * 2**30)
    found = plan(SEED_MODEL, where, survey, Objective(1))
    assert found.fits and found.layers == [53, 11]
    chosen, unaware = (Prediction(SEED_MODEL, each, survey) for each in (found, by_bytes(SEED_MODEL, where, 1)))
    assert by_bytes(SEED_MODEL, nodes(ROOMY, ROOMY), 1).layers == [34, 30]
    assert chosen.ms_per_token == pytest.approx(47, abs=0.5)
    assert unaware.ms_per_token == pytest.approx(73, abs=0.6)
    assert chosen.hop_ms == pytest.approx([0.154, 0.15], abs=0.001)


@pytest.mark.parametrize("is_order_fixed", [False, True])
@pytest.mark.parametrize(
    ("gbps", "gb", "ports", "goal", "expected"),
    [
        pytest.param((100, 200, 400), (40, 40, 40), (), "latency", [("n0", 1), ("n2", 9)], id="as little as it must"),
        pytest.param((1, 400, 200), (64, 2, 64), (), "throughput", [("n0", 1), ("n2", 9)], id="no faster with another"),
        pytest.param((400, 100, 200), (4, 4, 4), (), "latency", [("n0", 4), ("n1", 2), ("n2", 4)], id="fastest filled"),
        pytest.param(
            (400, 300, 300), (6, 6, 6), (LinkSpeed(9), LinkSpeed(1)), "latency", [("n0", 6), ("n2", 4)],
            id="a link",
        ),
        pytest.param(
            (400, 400, 400), (40,) * 3, (LinkSpeed(0, 125e6), LinkSpeed(0, 5e9)), "throughput", [("n0", 5), ("n2", 5)],
            id="a link that takes longer than what it saves",
        ),
    ],
)  # fmt: skip
def test_unequal_macs(
    gbps: tuple[float, ...],
    gb: tuple[int, ...],
    ports: tuple[LinkSpeed, ...],
    goal: Goal,
    expected: list[tuple[str, int]],
    *,
    is_order_fixed: bool,
) -> None:
    """Ten layers of 1 GB; 10 million numbers per row make links count."""
    spec = model([GB] * 10, hidden=10**6)
    objective = Objective(1, goal=goal, num_requests=8, is_order_fixed=is_order_fixed)
    found = plan(spec, nodes(*(size * GB for size in gb)), surveyed(spec, *gbps, ports=ports), objective)
    assert sorted(zip(names(found), found.layers, strict=True)) == expected


@pytest.mark.parametrize("goal", GOALS)
def test_of_plans_that_are_equally_fast_the_one_of_fewest_nodes_is_taken(goal: Goal) -> None:
    spec = model([1000, 1000])
    survey = surveyed(spec, 100, 100, ports=[LinkSpeed(rtt_ms=0.1)])
    assert names(plan(spec, nodes(ROOMY, ROOMY), survey, Objective(1, goal=goal))) == ["n0"]


def test_no_split_is_excluded_by_rounding() -> None:
    """Prompts take 0.1 ms per layer: [1, 3) no longer than others of two, though 0.1 + 0.1 + 0.1 is more than 0.3."""
    spec = model([GB, 2 * GB, 2 * GB, GB])
    speed = NodeSpeed((((1, 0.03), (512, 0.1)), ((1, 0.01), (512, 0.1))), ((1, 0.0), (512, 0.0)), 1000)
    survey = Survey({f"n{i}": speed for i in range(3)}, {"n1": LinkSpeed(), "n2": LinkSpeed()})
    assert plan(spec, nodes(ROOMY, ROOMY, ROOMY), survey, Objective(1)).layers == [1, 2, 1]


@pytest.mark.parametrize("goal", GOALS)
def test_a_split_is_judged_by_the_canvases_of_a_model_that_decodes_nothing_less(goal: Goal) -> None:
    head = ((1, 0.0), (64, 0.0))
    times = {"n0": ((1, 1.0), (8, 8.0)), "n1": ((1, 2.0), (8, 2.0))}
    survey = Survey({name: NodeSpeed((each,), head, 1000) for name, each in times.items()})
    for canvas, layers in ((None, [4]), (CanvasTraining(None, 8, refinement=Refinement()), [1, 3])):
        spec = replace(model([GB] * 4, hidden=1), canvas=canvas)
        objective = Objective(1, goal=goal, num_requests=1)
        assert plan(spec, nodes(ROOMY, ROOMY), survey, objective).layers == layers


@pytest.mark.parametrize(("bytes_per_s", "layers"), [(320_000 / 3e-3, [2]), (320_000 / 2e-3, [1, 1])])
def test_all_canvases_of_a_frame_count_on_the_hop_back(bytes_per_s: float, layers: list[int]) -> None:
    """Two canvases of 160 kB take 20 ms on one node, and on two 15 ms and two hops of 3 or 2 ms."""
    canvas = CanvasTraining(None, 8, refinement=Refinement())
    spec = replace(model([GB, 2 * GB], hidden=10_000), canvas=canvas)
    first, second = ([((1, ms), (16, ms)) for ms in each] for each in ((11.0, 9.0), (50.0, 4.0)))
    head = ((1, 0.0), (16, 0.0))
    speeds = {name: NodeSpeed(tuple(each), head, 1000) for name, each in (("n0", first), ("n1", second))}
    survey = Survey(speeds, {"n1": LinkSpeed(0.0, bytes_per_s)})
    objective = Objective(1, goal="throughput", num_requests=2)
    assert plan(spec, nodes(ROOMY, ROOMY), survey, objective).layers == layers


def test_memory_is_that_of_all_sessions() -> None:
    room = 3 * GB + 3 * 1000 * 1024  # three layers' weights, and their caches of one session
    for num_sessions, layers in ((1, [3, 1]), (2, [2, 2])):
        found = plan(SPEC, nodes(room, ROOMY), SURVEY, Objective(1024, num_sessions=num_sessions))
        assert found.fits and (found.layers, found.num_sessions) == (layers, num_sessions)


def test_where_a_speed_is_unknown_or_nothing_fits_the_split_is_by_bytes_and_given_layers_stay() -> None:
    where, roomy = nodes(GB, GB), nodes(ROOMY, ROOMY)
    survey = surveyed(SEED_MODEL, *SEED_SPEEDS)
    assert plan(SEED_MODEL, roomy, surveyed(SEED_MODEL, 546), Objective(1)) == by_bytes(SEED_MODEL, roomy, 1)
    found = plan(SEED_MODEL, where, survey, Objective(1))
    assert not found.fits and found == by_bytes(SEED_MODEL, where, 1)
    assert plan(SEED_MODEL, roomy, survey, Objective(1, layers=[10, 54])).layers == [10, 54]


def test_a_link_that_could_not_be_measured_is_no_better_than_its_probe_would_have_shown() -> None:
    spec, cable, wifi = model([GB] * 48), LinkSpeed(0.3, 2e9), LinkSpeed(40.0, 1.5e6)
    speeds = surveyed(spec, 400, 400, 400).speeds
    for slow in (wifi, UNMEASURED):
        survey = Survey(speeds, {"n1": slow, "n2": cable})
        assert names(plan(spec, nodes(*[40 * GB] * 3), survey, Objective(1))) == ["n0", "n2"]
    assert UNMEASURED.ms(10_000) > cable.ms(10_000)


def random_case(seed: int) -> tuple[ModelSpec, list[Node], Survey, Objective]:
    """Speeds that fall and rise with rows, links of any kind, budgets that often bind."""
    rng = random.Random(seed)
    spec = model([BLOCK * rng.choice([1, 3]) for _ in range(rng.randint(1, 6))], BLOCK * rng.randint(0, 4), per_token=1)

    def times() -> tuple[tuple[int, float], ...]:
        first, more = rng.randint(1, 40), rng.randint(0, 9)
        return tuple((rows, first + more * (rows - 1) / 4) for rows in (1, 2, 4, 8))

    where = nodes(*(BLOCK * rng.randint(2, 30) for _ in range(rng.randint(1, 4))))
    speeds = {
        node.name: NodeSpeed(tuple(times() for _ in spec.kinds), times(), rng.choice([1, 1e-6])) for node in where
    }
    ports = {node.name: LinkSpeed(rng.choice([0, 4, 30]), rng.choice([1e6, 1e7, 1e9])) for node in where[1:]}
    links = {("n1", "n2"): LinkSpeed(rng.choice([0, 100]))} if rng.random() < 0.5 else {}
    objective = Objective(
        1,
        num_sessions=rng.choice([1, 3]),
        goal=rng.choice(["latency", "throughput"]),
        num_requests=rng.choice([2, 5, 8]),
        is_order_fixed=rng.random() < 0.3,
    )
    return spec, where, Survey(speeds, ports, links), objective


def all_chains(spec: ModelSpec, where: list[Node], objective: Objective, num_sessions: int) -> Iterator[Plan]:
    """Every choice of workers, in every order that is allowed, with every split that fits."""
    for count in range(len(where)):
        for others in itertools.permutations(where[1:], count):
            if objective.is_order_fixed and list(others) != sorted(others, key=where.index):
                continue
            for cuts in itertools.combinations(range(1, spec.num_layers), count):
                layers = [end - start for start, end in itertools.pairwise((0, *cuts, spec.num_layers))]
                given = Objective(objective.context, num_sessions=num_sessions, layers=layers)
                found = plan(spec, [where[0], *others], NO_SPEEDS, given)
                if found.fits:
                    yield found


def test_no_other_chain_is_better() -> None:
    num_nodes = [check_best(seed) for seed in range(90)]
    assert min(num_nodes.count(count) for count in (0, 1, 2, 3)) >= 3, "cases of all kinds have to be tried"


def check_best(seed: int) -> int:
    """Compare a plan with all subsets, orders and splits; how many nodes it has, 0 if nothing fits.

    The latency is within the slack, then prompts count, then steps; or the throughput does, then the number of nodes.
    """
    spec, where, survey, objective = random_case(seed)
    best = plan(spec, where, survey, objective)
    found = best if best.fits else None
    wanted = max(objective.num_requests, objective.num_sessions) if objective.goal == "throughput" else 1
    all_that_fit = (
        list(all_chains(spec, where, objective, count))
        for count in (max(wanted, objective.num_sessions), objective.num_sessions)
    )
    chains = next(filter(None, all_that_fit), [])
    assert (found is not None) == bool(chains), seed
    if found is None:
        return 0
    times = [Prediction(spec, each, survey) for each in chains]
    chosen = Prediction(spec, found, survey)
    if objective.goal == "throughput":
        rates = [each.tokens_per_s(objective.num_requests) for each in times]
        assert chosen.tokens_per_s(objective.num_requests) == pytest.approx(max(rates)), seed
        near = [each for each, rate in zip(chains, rates, strict=True) if rate >= max(rates) * (1 - 1e-9)]
        assert len(found.assignments) == min(len(each.assignments) for each in near), seed
        return len(found.assignments)
    slack_ms = LATENCY_SLACK * min(each.ms_per_token for each in times)
    assert chosen.ms_per_token <= slack_ms * (1 + 1e-9), seed
    good = [each for each in times if each.ms_per_token <= slack_ms]
    for rows, sampled in ((PROMPT_ROWS, 0), (1, 1)):
        least = min(each.slowest_ms(rows, sampled) for each in good)
        assert chosen.slowest_ms(rows, sampled) == pytest.approx(least), seed
        good = [each for each in good if each.slowest_ms(rows, sampled) <= least * (1 + 1e-9)]
    assert chosen.ms_per_token == pytest.approx(min(each.ms_per_token for each in good)), seed
    return len(found.assignments)


def test_a_large_cluster_takes_no_time_to_speak_of() -> None:
    spec = model([GB] * 64, head=GB)
    survey = surveyed(spec, 546, 120, 400, 273, 819, 120, 273, 546, ports=[LinkSpeed(0.3, 2e9)] * 7)
    for goal in GOALS:
        assert plan(spec, nodes(*[24 * GB] * 8), survey, Objective(4096, goal=goal)).fits


# Context and sessions


def test_the_fastest_plan_gets_the_largest_context_that_it_has_room_for() -> None:
    """The second node is left out, though with it there would be room for a longer one."""
    where = nodes(2 * GB + 2 * 1000 * 1024, ROOMY, ROOMY)
    objective = Objective(512, 4096)
    found = plan(SPEC, where, SURVEY, objective)
    assert (names(found), found.layers, found.context) == (["n0", "n2"], [2, 2], 1024)
    assert plan(SPEC, where, NO_SPEEDS, objective).context == 4096


def test_workers_take_part_where_the_first_node_may_not_be_alone() -> None:
    objective = Objective(256, may_be_alone=False)
    assert names(plan(SPEC, nodes(ROOMY, ROOMY, ROOMY), SURVEY, objective)) == ["n0", "n2"]
    assert names(plan(SPEC, nodes(ROOMY), SURVEY, objective)) == ["n0"]
    assert names(plan(SPEC, nodes(ROOMY, ROOMY, ROOMY), SURVEY, Objective(256))) == ["n0"]
    left = nodes(2 * GB + 4 * 1000 * 256, ROOMY)  # what a loss leaves is planned by speed, too
    assert names(plan(SPEC, left, SURVEY, Objective(256))) == ["n0", "n1"]


def test_for_throughput_all_are_kept_at_work_and_there_is_memory_for_all_requests_if_there_can_be() -> None:
    """Layers of 2.5, 10 and 5 ms: three on the first node, if they have room there with the caches of four sessions."""
    throughput = Objective(256, goal="throughput", num_requests=4)

    def layers(*budgets: int, objective: Objective = throughput) -> list[int]:
        return plan(SPEC, nodes(*budgets), SURVEY, objective).layers

    assert layers(ROOMY, ROOMY, ROOMY, objective=Objective(256)) == [4]
    assert layers(ROOMY, ROOMY, ROOMY) == [3, 1]
    whole = 4 * (GB + 1000 * 256)  # with one session's caches
    assert layers(whole, ROOMY, ROOMY, objective=Objective(256)) == [4], "latency is of one session"
    for sessions, first in ((4, 3), (3, 2)):
        assert layers(3 * GB + 3 * 1000 * 256 * sessions, ROOMY, ROOMY)[0] == first
    of_one = [count * (GB + 1000 * 256) for count in (3, 1, 1)]
    assert layers(*of_one) == [3, 1], "better for one session than by bytes"


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


def test_the_largest_context_is_the_one_that_trying_all_of_them_finds() -> None:
    """Of any split by bytes, and of one that was given."""
    for seed in range(60):
        rng = random.Random(seed)
        spec = random_model(rng)
        where = [Node(f"n{place}", BLOCK * rng.randint(10, 90)) for place in range(rng.randint(1, 3))]
        ones = [1] * (len(where) - 1)
        layers = [*ones, spec.num_layers - len(ones)] if seed % 3 == 0 else None
        used = [node for node in where if node.name in by_bytes(spec, where, BLOCK, layers).names]
        tried = [by_bytes(spec, used, each, layers) for each in range(BLOCK, LONGEST + 1, BLOCK)]
        fitting = [each for each in tried if each.fits and len(each.names) == len(used)]
        found = plan(spec, where, NO_SPEEDS, Objective(BLOCK, LONGEST, layers=layers))
        assert found == (fitting or tried[:1])[-1], seed


@pytest.mark.parametrize(
    ("last", "fits", "has_drafter"), [(10 * GB, True, True), (3 * GB, True, False), (GB // 10, False, False)]
)
def test_a_drafter_that_does_not_fit_on_what_is_left_is_left_out(last: int, fits: bool, has_drafter: bool) -> None:
    """The layers go on without it; a split that the user gave stays."""
    spec = replace(model([GB] * 4), drafter=model([3 * GB]))
    whole = plan(spec, nodes(ROOMY, ROOMY, ROOMY), NO_SPEEDS, Objective(100))
    for layers in (None, (3, 1)):
        planner = Planner(spec, NO_SPEEDS, Objective(100, layers=layers), whole)
        found = planner.best(nodes(3 * GB + GB // 2, last))
        assert (found is not None) == fits
        assert found is None or (found.has_drafter == has_drafter and found.layers == list(layers or found.layers))


def test_a_planner_searches_once_for_the_same_nodes_and_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions follow each other while a node is awaited or loads."""
    searched: list[Sequence[Node]] = []

    def counted(spec: ModelSpec, where: Sequence[Node], speeds: Survey, objective: Objective) -> Plan:
        searched.append(where)
        return plan(spec, where, speeds, objective)

    planner = Planner(SPEC, SURVEY, Objective(100), plan(SPEC, nodes(ROOMY, ROOMY, ROOMY), SURVEY, Objective(100)))
    monkeypatch.setattr("coordinator.planning.planner.plan", counted)
    for where in (nodes(ROOMY, ROOMY), nodes(3 * GB, 2 * GB), nodes(GB, GB)):
        assert planner.best(where) == planner.best(where)
    assert len(searched) == 3 and planner.best(nodes(GB, GB)) is None
    for each, layers in ((planner, [4]), (replace(planner, speeds=surveyed(SPEC, 1, 400)), [1, 3])):
        found = each.best(nodes(ROOMY, ROOMY))
        assert found and found.layers == layers


@pytest.mark.parametrize(("layers", "expected"), [((2, 1, 1), [2, 1, 1]), ((1, 2, 1), [1, 1, 2])])
def test_a_returned_node_gets_the_given_layers_or_others_if_those_do_not_fit(
    layers: Sequence[int], expected: list[int]
) -> None:
    """It was missing at first, so that nothing refused them."""
    whole = plan(SPEC, nodes(3 * GB, 3 * GB), NO_SPEEDS, Objective(100))
    found = Planner(SPEC, NO_SPEEDS, Objective(100, layers=layers), whole).best(nodes(3 * GB, 3 * GB // 2, 3 * GB))
    assert found and found.layers == expected


def test_the_whole_plan_is_kept_while_each_of_its_nodes_has_memory_for_its_part() -> None:
    whole = plan(SPEC, nodes(3 * GB, 3 * GB), NO_SPEEDS, Objective(100))
    planner = Planner(SPEC, NO_SPEEDS, Objective(100), whole)
    assert whole.layers == [2, 2] and planner.best(nodes(3 * GB, 3 * GB)) == whole
    found = planner.best(nodes(4 * GB, 5 * GB // 2))
    assert found and found.layers == [2, 2], "a fresh plan would be [3, 1]"
    assert [each.memory_bytes for each in found.assignments] == [4 * GB, 5 * GB // 2]
    found = planner.best(nodes(4 * GB, 3 * GB // 2))
    assert found and found.fits and found.layers == [3, 1]
    assert planner.best(nodes(3 * GB, GB // 2)) is None


def test_a_drafter_lies_on_the_node_that_makes_answers_alone() -> None:
    """Nodes that compute prompts need no memory for it, and are not asked to load it."""
    spec = replace(model([GB] * 4), drafter=model([3 * GB]))
    found = plan(spec, nodes(8 * GB, GB + GB // 2, ROOMY), NO_SPEEDS, Objective(100, goal="prompt", layers=(2, 1, 1)))
    bare = replace(spec, drafter=None)
    assert found.fits and found.prompt_end == 2 and found.has_drafter
    assert [each.weight_bytes for each in found.assignments] == [
        spec.shard_bytes(0, 4), bare.shard_bytes(2, 3), bare.shard_bytes(3, 4)
    ]  # fmt: skip
    assert [found.spec_on(stage, spec).drafts for stage in range(3)] == [True, False, False]
