"""What `plan` and `bench` do once their flags are parsed."""

import json
from pathlib import Path

from coordinator.cli.report import plan_as_json, print_plan, require_writable
from coordinator.cluster.open import make_plan, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.measure.bench import Workload, measure
from coordinator.measure.bench_report import check_plot, to_markdown, write_plot
from coordinator.planning.plan import require_fit


async def run_plan(options: ClusterOptions, *, as_json: bool) -> None:
    """Print where each layer would go. Raises ConfigError, after printing, if it does not fit."""
    _, spec = await read_model(options.model)
    async with open_peers(options, spec) as peers:
        plan = await make_plan(options.cluster, spec, peers, options.context)
    if as_json:
        print(json.dumps(plan_as_json(plan, spec)))
    else:
        print_plan(plan, spec)
    require_fit(plan, spec)


async def run_bench(options: ClusterOptions, workload: Workload, *, as_json: bool, plot: Path | None) -> None:
    """Measure, then print the table or the JSON object; last, where nothing can be lost any more, the picture."""
    if plot is not None:
        check_plot(plot)
        require_writable("plot", plot)
    bench = await measure(options, workload)
    print(json.dumps(bench.as_json()) if as_json else to_markdown(bench), flush=True)
    if plot is not None:
        write_plot(bench, plot)
