"""A cluster's plan as a pipeline of numbers: by what its nodes have measured of themselves. Loads nothing."""

from coordinator.cluster.open import ask_nodes, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.survey import is_worth_measuring, known_speeds
from coordinator.measure.simulate import Hop, Pipeline, StageTimes
from coordinator.planning.fastest import Aim, best_plan
from coordinator.planning.plan import Plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import Survey
from worker.errors import InputError
from worker.model.modelspec import ModelSpec


async def ask_pipeline(options: ClusterOptions) -> Pipeline:
    """The cluster's own plan, as it was measured. Raises InputError where nothing is measured."""
    checkpoint, spec = await read_model(options.model)
    async with open_peers(options, spec) as peers:
        if not is_worth_measuring(peers):
            expected = (
                "expected --stage-ms 26.5,6.5 or --measured FILE, or workers on other machines, which are measured"
            )
            raise InputError("simulate", expected)
        nodes = await ask_nodes(options.cluster, peers)
        known = await known_speeds(options, checkpoint, peers)
    aim = Aim(min(options.context, spec.context), is_order_fixed=options.cluster.order == "fixed", may_be_alone=False)
    plan = best_plan(spec, nodes, known, aim, options.cluster.layers)
    if lacking := [each.name for each in plan.assignments if each.name not in known.speeds]:
        raise InputError("simulate", f"expected nodes that have measured themselves, found {', '.join(lacking)}")
    return profiled_pipeline(spec, plan, known)


def profiled_pipeline(spec: ModelSpec, plan: Plan, survey: Survey) -> Pipeline:
    """A plan over nodes whose speeds are known: frames of all sizes that one of them has tried."""
    times = Prediction(spec, plan, survey)
    speeds = [survey.speeds[each.name] for each in plan.assignments]
    sizes = sorted({rows for speed in speeds for column in (*speed.kinds, speed.head) for rows, _ in column})
    by_size = [times.stages_ms(rows) for rows in sizes]
    columns = zip(*by_size, strict=True)
    stages = [StageTimes(tuple((rows, ms / 1e3) for rows, ms in zip(sizes, column, strict=True))) for column in columns]
    ways = [Hop(link.rtt_ms / 2e3, link.bytes_per_s, spec.row_bytes) for link in times.links[:-1]]
    back = [Hop(link.rtt_ms / 2e3) for link in times.links[-1:]]
    return Pipeline(tuple(stages), tuple([*ways, *back] or [Hop(0.0)]))
