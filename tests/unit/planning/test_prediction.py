"""What a plan's times are, by what is known of rows; what is not known is None."""

from dataclasses import replace

import pytest

from coordinator.planning.plan import PROMPTS, Goal, Node, Objective, Plan, assign
from coordinator.planning.planner import plan, why_not_shared
from coordinator.planning.prediction import Prediction, report_plan
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed, NodeSpeed, Survey
from protos.brigade_pb2 import Cache
from tests.unit.planning.test_planner import GB, ROOMY, model, surveyed
from worker.model.cache_spec import Memory, cache_spec
from worker.model.model_spec import CanvasTraining, LayerSpec, Refinement

SPEC = model([GB] * 4, hidden=500)  # 1000 bytes per row
FLAT = ((1, 2.0), (8, 2.0), (512, 20.0))  # milliseconds of a layer by rows
MEASURED = NodeSpeed((FLAT,), ((1, 1.0), (512, 1.0)), 500)
LINK = LinkSpeed(rtt_ms=1.0, bytes_per_s=1e6)  # a millisecond per row


def split(*layers: int) -> Plan:
    return plan(SPEC, [Node(f"n{i}", ROOMY) for i in range(len(layers))], NO_SPEEDS, Objective(1, layers=layers))


def predicted(*layers: int) -> Prediction:
    speeds = {f"n{i}": MEASURED for i in range(len(layers))}
    return Prediction(SPEC, split(*layers), Survey(speeds, {"n1": LINK}))


def test_a_token_takes_its_stages_and_its_hops_and_two_requests_use_both_stages() -> None:
    found = predicted(3, 1)
    assert found.stage_ms == [6.0, 3.0] and found.hop_ms == [1.5, 0.5]  # a row there, next to nothing back
    assert found.ms_per_token == 11.0 and found.tokens_per_s() == pytest.approx(1000 / 11)
    # frames of one row pass 11 ms behind each other's 6; one of two rows would take 1 ms more on the link
    assert found.tokens_per_s(2) == pytest.approx(2000 / 12, rel=0.1)
    alone = predicted(4)
    assert (alone.stage_ms, alone.hop_ms, alone.ms_per_token) == ([9.0], [0.0], 9.0)
    assert alone.tokens_per_s(8) == pytest.approx(8000 / 9), "rows up to 8 cost nothing here"


def test_a_prompt_goes_in_chunks_over_its_links_and_is_sampled_once() -> None:
    """Four layers of 20 ms per 512 rows: larger chunks take as long per row, and their last row is sampled."""
    assert predicted(4).prefill_s(512) == pytest.approx(0.081)
    assert predicted(4).prefill_s(2048) == pytest.approx(4 * 0.080 + 0.001, rel=0.05)
    found = predicted(2, 2).prefill_s(2000)
    assert found is not None and found > 2.0, "a millisecond per row on the link, which no chunk avoids"


def test_assumed_operations_per_second_give_times_of_prompts_whose_attention_grows() -> None:
    """A layer multiplies 10^6 times per row, and 100 times per row and earlier token; 2 operations each, 10^12/s."""
    layers = (LayerSpec(GB, num_products=10**6, num_attended=100),) * 4
    spec = replace(SPEC, layers=layers, context=10**6)
    speeds = Survey({"n0": NodeSpeed.assumed(spec, 1000, tflops=1)})
    found = Prediction(spec, plan(spec, [Node("n0", ROOMY)], NO_SPEEDS, Objective(1)), speeds)
    per_row_s = 4 * 2 * 10**6 / 1e12
    for num in (2048, 65536):
        attended_s = 4 * 2 * 100 * num / 2 / 1e12  # a row sees half of the prompt on average
        assert found.prefill_s(num) == pytest.approx(num * (per_row_s + attended_s), rel=0.1)
    assert found.prefill_s(10**6 + 1) is None, "longer than its context"
    assert found.ms_per_token == pytest.approx(4.0), "reading 1 GB takes as long as 500 rows"


def test_further_rows_read_further_experts_until_all_are_read() -> None:
    spec = replace(SPEC, layers=(LayerSpec(8 * GB, idle_bytes=7 * GB, num_products=10**6),))
    times = NodeSpeed.assumed(spec, 1000, tflops=1).ms_up_to
    assert [times(spec, rows)[-1] for rows in (1, 4, 8, 100)] == pytest.approx([1, 4, 8, 8])


def test_a_chain_begins_with_what_its_nodes_measured_of_prompt_chunks() -> None:
    assert predicted(3, 1).chunks_s == {512: [pytest.approx(0.060), pytest.approx(0.021)]}
    assert Prediction(SPEC, split(3, 1), Survey({"n0": MEASURED})).chunks_s == {}, "a node has not measured itself"
    nodes = [Node(f"n{i}", ROOMY) for i in range(2)]
    apart = Prediction(
        SPEC, assign(SPEC, nodes, (3, 1), 1, 1, answers_alone=True), Survey({"n0": MEASURED, "n1": MEASURED})
    )
    assert apart.of_answers.chunks_s == {512: [pytest.approx(0.081)]}, "the first node computes some prompts alone"
    assert predicted(3, 1).of_answers.chunks_s == predicted(3, 1).chunks_s


def test_caches_are_read_with_every_token_and_by_each_session() -> None:
    """500 bytes per token and layer at 5 GB/s: 0.1 ms of a thousand tokens, and of each of two requests in a frame."""
    spec, speed = model([GB] * 4, per_token=500), NodeSpeed((FLAT,), ((1, 1.0), (512, 1.0)), 5)
    found = {}
    for context in (1, 1000):
        one = plan(spec, [Node("n0", ROOMY)], NO_SPEEDS, Objective(context))
        found[context] = Prediction(spec, one, Survey({"n0": speed}))
    assert found[1].ms_per_token == pytest.approx(9.0, abs=0.001)
    assert found[1000].ms_per_token == pytest.approx(9.0 + 4 * 0.1)
    assert found[1000].tokens_per_s(2) == pytest.approx(2000 / (9.0 + 2 * 4 * 0.1))
    assert found[1000].prefill_s(512) == pytest.approx(0.0814), "the prompt's last row is a token's"


def test_a_model_that_decodes_whole_canvases_only_has_times_of_their_steps_and_none_of_tokens() -> None:
    """Eight rows of 500 bytes per token and layer at 5 GB/s; what a step makes of its rows goes back with them."""
    spec = replace(model([GB] * 4, hidden=500, per_token=500), canvas=CanvasTraining(None, 8, refinement=Refinement()))
    speed = NodeSpeed((((1, 2.0), (8, 4.0), (512, 20.0)),), ((1, 1.0), (8, 3.0), (512, 9.0)), 5)
    survey = Survey({"n0": speed, "n1": speed}, {"n1": LINK})
    where = [Node(f"n{i}", ROOMY) for i in range(2)]
    found = Prediction(spec, plan(spec, where, NO_SPEEDS, Objective(1000, layers=(3, 1))), survey)
    assert found.stage_ms == pytest.approx([3 * 4.1, 4.1 + 3.0]) and found.hop_ms == [8.5, 8.5]
    assert found.ms_per_step == pytest.approx(4 * 4.1 + 3.0 + 2 * 8.5)
    assert found.steps_per_s() == pytest.approx(1000 / found.ms_per_step)
    assert found.ms_per_token is found.tokens_per_s() is found.tokens_per_s(8) is None
    layers = tuple(replace(each, num_products=100, num_attended=1) for each in spec.layers)
    attending = Prediction(replace(spec, layers=layers), split(4), survey)
    assert attending.ms_per_step == pytest.approx(4 * (4.0 + 4.0 / 100) + 3.0, abs=0.01), "of a context of one token"


def test_no_more_is_read_than_a_query_sees() -> None:
    memory = Memory(window=100, heads=1, key_size=2, value_size=3, item=2)
    for size, seen in ((50, 50), (1000, 100)):
        assert cache_spec(memory, Cache()).read_bytes(memory, size) == seen * 10
    state = Memory(state_arrays=2, state_bytes=77)
    assert cache_spec(state, Cache()).read_bytes(state, 1000) == 77


def test_what_further_rows_cost_is_not_known_of_assumed_speeds_and_without_speeds_nothing_is() -> None:
    """Frames of one row can still be told: the slowest stage, never idle."""
    found = Prediction(SPEC, split(2, 2), surveyed(SPEC, 500, 500))
    assert found.stage_ms == [4.0, 4.0] and found.tokens_per_s(8) == pytest.approx(250)
    assert found.prefill_s(2000) is None
    found = Prediction(SPEC, split(2, 2), NO_SPEEDS)
    assert found.stage_ms == [None, None]
    assert found.ms_per_token is found.tokens_per_s() is found.tokens_per_s(8) is found.prefill_s(2000) is None


@pytest.mark.parametrize(
    ("fast", "per_token", "bytes_per_s", "budgets", "layers"),
    [
        (1.0, 1000, 1e9, (ROOMY, ROOMY), [4, 4]),
        (3.0, 1000, 1e9, (ROOMY, ROOMY), [6, 2]),
        (1.0, 1000, 1e9, (ROOMY, 3 * GB), [6, 2]),  # the other one has memory for two layers and their caches
        (1.0, 1000, 1e9, (7 * GB, ROOMY), None),  # the first one does not hold all
        (1.0, 100_000, 1e6, (ROOMY, ROOMY), None),  # the link would take longer than all of it
    ],
)
def test_prompts_are_computed_by_all_where_that_is_faster_and_answers_by_the_first_node_alone(
    fast: float, per_token: int, bytes_per_s: float, budgets: tuple[int, int], layers: list[int] | None
) -> None:
    spec = model([GB] * 8, per_token=per_token)
    quick = NodeSpeed((tuple((rows, ms / fast) for rows, ms in FLAT),), MEASURED.head, 500)
    link = LinkSpeed(rtt_ms=0.1, bytes_per_s=bytes_per_s)
    survey = Survey({"n0": quick, "n1": MEASURED}, {"n1": link})
    where = [Node(f"n{i}", budget) for i, budget in enumerate(budgets)]
    found = plan(spec, where, survey, Objective(1, goal="prompt"))
    assert (found.layers if found.prompt_end else None) == layers
    if layers is None:
        return
    alone = Prediction(spec, plan(spec, where[:1], survey, Objective(1)), survey)
    apart = Prediction(spec, found, survey)
    assert [(each.start, each.end) for each in found.assignments] == [(0, 8), (layers[0], 8)]
    assert found.assignments[0].weight_bytes == 8 * GB and found.fits
    assert apart.ms_per_token == alone.ms_per_token and apart.hop_ms == [0.0, 0.0]
    alone_s, apart_s = alone.prefill_s(4000), apart.prefill_s(4000)
    assert alone_s and apart_s and alone_s / apart_s == pytest.approx(8 / layers[0], rel=0.15)
    report = report_plan(spec, where, survey, Objective(1))
    assert "--objective prompt" in report.alternatives
    assert ("With --objective prompt" in report.advice) == (layers == [4, 4])  # else not for 2,000 tokens


def test_prompts_that_would_take_longer_over_all_nodes_are_told_as_those_of_the_first_one_alone() -> None:
    spec = replace(model([GB] * 8, per_token=1000), context=65_536)
    where = [Node(f"n{i}", ROOMY) for i in range(2)]
    for rtt_ms, layers, shared in ((800.0, None, 16_000), (1e6, (4, 4), None)):
        survey = Survey({"n0": MEASURED, "n1": MEASURED}, {"n1": LinkSpeed(rtt_ms=rtt_ms, bytes_per_s=1e9)})
        alone = Prediction(spec, plan(spec, where[:1], survey, Objective(1)), survey)
        report = report_plan(spec, where, survey, Objective(1, goal="prompt", layers=layers))
        assert report.chosen.plan.prompt_end
        pairs = [(alone.prefill_s(num) or 0.0, report.chosen.prefill_s(num) or 0.0) for num in PROMPTS]
        assert [one > several for one, several in pairs] == [False, bool(shared), bool(shared)]
        assert pairs[0][0] == pairs[0][1]
        said = f"Prompts of {shared} tokens are computed by n0 and n1" if shared else "computed by n0 alone"
        assert said in report.advice
        chain = report.alternatives["n0 + n1"].plan
        assert chain.prompt_end is None


@pytest.mark.parametrize(("num_attended", "layers"), [(0, None), (1000, [2, 2])])
def test_prompts_are_shared_for_the_time_of_their_attention(num_attended: int, layers: list[int] | None) -> None:
    """A chunk takes 1 ms per layer without it, 9 ms on average with it, and the link 4 ms."""
    memory = (Memory(None, 1, 1000, 0, 1),)
    layer = LayerSpec(GB, memory, num_products=10**6, num_attended=num_attended)
    spec = replace(SPEC, layers=(layer,) * 4, context=65_536)
    where = [Node(f"n{i}", ROOMY) for i in range(2)]
    speeds = {node.name: NodeSpeed.assumed(spec, 1000, tflops=1) for node in where}
    survey = Survey(speeds, {"n1": LinkSpeed(rtt_ms=0.1, bytes_per_s=1.28e8)})
    found = plan(spec, where, survey, Objective(1, goal="prompt"))
    assert (found.layers if found.prompt_end else None) == layers


def test_an_automatic_objective_gives_prompts_to_nodes_that_make_tokens_no_faster() -> None:
    spec = model([GB] * 8, per_token=1000)
    where = [Node(f"n{i}", ROOMY) for i in range(2)]
    for first_gb, alone in ((ROOMY, True), (7 * GB, False)):
        where[0] = Node("n0", first_gb)
        survey = Survey({"n0": MEASURED, "n1": MEASURED}, {"n1": LinkSpeed(rtt_ms=2.0, bytes_per_s=1e9)})
        latency, found = (plan(spec, where, survey, Objective(1, goal=goal)) for goal in ("latency", "auto"))
        assert (latency.names == ["n0"]) is alone is (found.prompt_end is not None)
        assert found.names == ["n0", "n1"]
        assert "--objective prompt" not in report_plan(spec, where, survey, Objective(1, goal="auto")).alternatives


def test_where_prompts_cannot_be_shared_they_are_planned_by_latency_and_the_reason_is_given() -> None:
    spec = model([GB] * 8, per_token=1 << 14, window=4096)
    where = [Node(f"n{i}", 5 * GB) for i in range(3)]
    survey = Survey({f"n{i}": MEASURED for i in range(3)}, {f"n{i}": LinkSpeed(rtt_ms=5.0) for i in (1, 2)})
    goals: tuple[Goal, ...] = ("prompt", "latency", "throughput")
    prompt, latency, throughput = (
        plan(spec, where, survey, Objective(1, goal=goal, num_requests=64)) for goal in goals
    )
    assert prompt.names == latency.names == ["n0", "n1"] and throughput.names == ["n0", "n1", "n2"]
    assert "window" in report_plan(spec, where, survey, Objective(1, goal="prompt")).advice
    goal = Objective(1, goal="prompt")
    assert (
        why_not_shared(spec, where[:1], survey, goal, prompt) != why_not_shared(spec, where, survey, goal, prompt) != ""
    )
    assert why_not_shared(SPEC, where, survey, goal, replace(prompt, prompt_end=1)) == ""


def test_prompts_are_shared_by_the_nodes_that_make_them_faster_whatever_others_there_are() -> None:
    spec, link = model([GB] * 8, per_token=1000), LinkSpeed(rtt_ms=0.1, bytes_per_s=1e9)
    slow = NodeSpeed((tuple((rows, ms * 1000) for rows, ms in FLAT),), MEASURED.head, 500)
    speeds = {"n0": MEASURED, "slow": slow, "small": MEASURED, "n1": MEASURED, "n2": MEASURED}
    speeds |= {"unknown": NodeSpeed((FLAT[:1],), MEASURED.head[:1], 500, is_measured=False)}
    where = [Node(name, 10_000 if name == "small" else ROOMY) for name in speeds]
    survey = Survey(speeds, dict.fromkeys(speeds, link))
    found = plan(spec, where, survey, Objective(1, goal="prompt"))
    assert found.names == ["n0", "n1", "n2"] and found.prompt_end and max(found.layers) == 3
    report = report_plan(spec, where, survey, Objective(1, goal="prompt"))
    assert report.left_out == ("slow", "small", "unknown") and "by n0 and n1 and n2" in report.advice
    many = [Node(f"n{i}", ROOMY) for i in range(3)]
    survey = Survey({node.name: MEASURED for node in many}, {node.name: link for node in many})
    assert plan(model([GB] * 2, per_token=1000), many, survey, Objective(1, goal="prompt")).layers == [1, 1]


def test_it_is_told_whether_memory_or_speed_keeps_prompts_on_one_node_and_an_even_split_is_one_of_answers() -> None:
    spec = model([GB] * 8, per_token=100_000)
    link = LinkSpeed(rtt_ms=0.1, bytes_per_s=1e6)
    one_row = NodeSpeed((FLAT[:1],), MEASURED.head[:1], 500, is_measured=False)
    for first_gb, speed, reason in (
        (ROOMY, MEASURED, "faster"),
        (7 * GB, MEASURED, "memory"),
        (ROOMY, one_row, "tflops"),
    ):
        where = [Node("n0", first_gb), Node("n1", ROOMY)]
        report = report_plan(spec, where, Survey({"n0": speed, "n1": speed}, {"n1": link}), Objective(1, goal="prompt"))
        assert reason in report.advice.split(".")[0], report.advice
        even = report.alternatives["even split"].plan
        assert even.prompt_end is None and even.layers == [4, 4]
    cramped = [Node("n0", ROOMY), Node("n1", 10_000)]  # without known speeds all share prompts, if they can
    assert "other nodes lack memory" in report_plan(spec, cramped, NO_SPEEDS, Objective(1, goal="prompt")).advice


def test_a_model_whose_windows_are_too_large_for_one_message_is_planned_as_usual() -> None:
    where = [Node(f"n{i}", ROOMY) for i in range(2)]
    for window, end in ((64, 4), (4096, None)):
        spec = model([GB] * 8, per_token=1 << 14, window=window)
        assert plan(spec, where, NO_SPEEDS, Objective(1, goal="prompt")).prompt_end == end
