"""What `plan`, `verify` and `bench` do once their flags are parsed."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from coordinator.cli.forecasts import print_forecasts
from coordinator.cli.plan_report import PlanReport
from coordinator.cli.report import require_writable
from coordinator.cluster.nodes_file import read_nodes
from coordinator.cluster.open import ask_nodes, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say, telling_interrupts
from coordinator.cluster.survey import known_speeds
from coordinator.cluster.write_layers import require_changeable, write_layers
from coordinator.decoding.decode import Decode
from coordinator.measure.bench import Workload, measure
from coordinator.measure.bench_plot import check_plot, write_plot
from coordinator.measure.bench_report import print_bench, to_markdown
from coordinator.measure.failover import Losses, measure_failover
from coordinator.measure.failover_report import print_failover
from coordinator.measure.forecast import Assumed, find_times, forecast
from coordinator.measure.verify import verify
from coordinator.planning.fastest import Aim
from coordinator.planning.outlook import outlook_of
from coordinator.planning.plan import require_fit
from worker.process.call_thread import run_aside


async def run_plan(
    options: ClusterOptions,
    aim: Aim,
    counts: Sequence[int],
    *,
    macs: Path | None,
    to_write: Path | None,
    anew: bool = False,
    as_json: bool,
) -> None:
    """Print where each layer would go, on the cluster's nodes or on the `macs` of a file; write it to the other file.

    With `anew` the nodes measure themselves whatever they have kept.

    Raises:
        ConfigError: the file is wrong; or, after printing, it does not fit.
    """
    if to_write is not None:
        require_changeable(to_write)
    assumed = None if macs is None else read_nodes(macs)
    checkpoint, spec = await read_model(options.model)
    if options.wished_context and options.wished_context > spec.context:
        say(f"note: planned for {spec.context} tokens: {spec.name} has no room for {options.wished_context}")
    aim = replace(aim, context=min(aim.context, spec.context), is_order_fixed=options.cluster.order == "fixed")
    if assumed is not None:
        aim = replace(aim, is_order_fixed=assumed.is_order_fixed)
        nodes, known = assumed.nodes, assumed.survey(spec)
    else:
        async with open_peers(options, spec) as peers:
            nodes = await ask_nodes(options.cluster, peers)
            known = await known_speeds(options, checkpoint, peers, anew=anew)
    outlook = outlook_of(spec, nodes, known, aim, options.cluster.layers)
    report = PlanReport(spec, outlook, known, aim, counts)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        report.print()
    require_fit(report.plan, spec)
    if to_write is not None:
        await run_aside(partial(write_layers, to_write, options.cluster, report.plan))


async def run_forecast(options: ClusterOptions, assumed: Assumed, *, as_json: bool) -> None:
    """Print a forecast per number of requests."""
    times = await find_times(options, assumed)
    forecasts = await run_aside(lambda: forecast(times, assumed))
    if as_json:
        print(json.dumps({"rows": times.rows_are, "simulated": [asdict(found) for found in forecasts]}))
    else:
        print_forecasts(forecasts, times)


async def run_verify(
    options: ClusterOptions, decode: Decode, *, max_tokens: int, seed: int, stream: bool = False, as_json: bool
) -> int:
    """Print what was compared. The exit code: 0 if the cluster is the model, 1 if not.

    Into a pipe or a file each line goes as it is found; a terminal shows a bar meanwhile, and the lines at the end.
    """
    lines: list[str] = []
    tell = lines.append if as_json or sys.stdout.isatty() else partial(print, flush=True)
    report = await verify(options, decode, max_tokens=max_tokens, seed=seed, stream=stream, tell=tell)
    if as_json:
        print(report.to_json())
    else:
        print("\n".join([*lines, report.summary()]), flush=True)
    return 0 if report.holds else 1


async def run_bench(
    options: ClusterOptions, workload: Workload, *, as_json: bool, is_wide: bool = False, plot: Path | None
) -> None:
    """Measure, then print the table or the JSON object; last, where nothing can be lost any more, the picture.

    Raises:
        BrigadeError: the cluster failed; after what was measured until then is printed.
    """
    if plot is not None:
        check_plot(plot)
        require_writable("plot", plot)
    with telling_interrupts("interrupted before all was measured: no figures"):
        bench = await measure(options, workload)
    if as_json:
        print(json.dumps(bench.as_json()), flush=True)
    elif is_wide:
        print(to_markdown(bench), flush=True)
    else:
        print_bench(bench)
    if plot is not None:
        write_plot(bench, plot)
    if bench.failure is not None:
        raise bench.failure


async def run_failover(options: ClusterOptions, losses: Losses, *, as_json: bool) -> int:
    """Lose workers, then print the table or the JSON object. The exit code: 1 if a token was another one."""
    failover = await measure_failover(options, losses)
    if as_json:
        print(json.dumps(failover.as_json()))
    else:
        print_failover(failover)
    return 0 if failover.is_equal else 1
