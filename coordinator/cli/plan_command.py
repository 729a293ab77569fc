"""`brigade plan`: its flags, and what they amount to."""

import typer

from coordinator.cli import flags, plan_flags
from coordinator.cli.chosen import chosen_cluster
from coordinator.cli.parse import parse_counts, parse_times
from coordinator.cli.plan_checks import check_plan_flags, check_write
from coordinator.sessions.slots import MOST_WAITING


def plan(
    ctx: typer.Context,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    macs: plan_flags.MacsFile = None,
    objective: flags.Aims = "latency",
    write: plan_flags.Write = False,
    measure_again: plan_flags.MeasureAgain = False,
    simulate: plan_flags.Simulate = False,
    stage_ms: plan_flags.StageMs = None,
    row_ms: plan_flags.RowMs = None,
    hop_ms: plan_flags.HopMs = "0.5",
    gbps: plan_flags.Gbps = None,
    measured: plan_flags.Measured = None,
    concurrency: plan_flags.PlannedConcurrency = None,
    num_prompt: plan_flags.ForecastPrompt = None,
    num_tokens: plan_flags.ForecastTokens = None,
    prefill_step_size: flags.PrefillStepSize = None,
    as_json: flags.Json = False,
) -> None:
    """Where each layer would go and whether it fits; loads nothing. With --simulate, how fast it would be.

    Does it fit, with 16,000 tokens per session: brigade plan --config cluster.yaml --context 16000

    And with other layers on each node: brigade plan --config cluster.yaml --layers 20,16

    Since the Macs were measured one of them was given other work: brigade plan --config cluster.yaml --measure-again

    Macs that you may buy, with memory, GB/s and links as nodes.yaml says: brigade plan --nodes nodes.yaml --model demo

    Two stages of 26.5 and 6.5 ms, which are not there: brigade plan --simulate --stage-ms 26.5,6.5 --hop-ms 3,0.3

    From a run with one request, what 16 would make: brigade bench --concurrency 1 --json > one.json; brigade plan
    --simulate --measured one.json --concurrency 16

    By what the nodes measure of themselves: brigade plan --simulate --config cluster.yaml
    """
    check_plan_flags(ctx)
    options = chosen_cluster(ctx)
    check_write(ctx, options.cluster)
    counts = parse_counts("concurrency", concurrency or ("1,2,4,8,16" if simulate else "8"), most=MOST_WAITING)
    stages_ms = parse_times("stage_ms", stage_ms, least=0.001) if stage_ms is not None else ()
    rows_ms = None if row_ms is None else parse_times("row_ms", row_ms)
    hops_ms = parse_times("hop_ms", hop_ms)

    from coordinator.cli.commands import run_forecast, run_plan
    from coordinator.cli.run_async import run_async
    from coordinator.measure.forecast import Assumed
    from coordinator.planning.fastest import Aim

    if not simulate:
        most = counts[-1]
        num_sessions = most if concurrency or objective == "throughput" else 1
        aim = Aim(options.context, num_sessions, objective, most)
        to_write = config if write else None
        run_async(run_plan(options, aim, counts, macs=macs, to_write=to_write, anew=measure_again, as_json=as_json))
    else:
        assumed = Assumed(
            stages_ms, rows_ms, hops_ms, gbps, measured, counts, num_prompt, num_tokens, prefill_step_size
        )
        run_async(run_forecast(options, assumed, as_json=as_json))
