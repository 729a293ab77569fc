"""`brigade bench`: its flags, and the tables or objects that it prints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coordinator.cli import flags
from coordinator.cli.parse import find_config, given_flags, parse_counts, parse_layers, refuse_flags
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.decoding.decode import Decode, make_decode
from coordinator.sessions.slots import MOST_WAITING
from worker.errors import InputError

if TYPE_CHECKING:  # they import mlx, for which --help should not wait
    from coordinator.bench.bench import Workload
    from coordinator.bench.failover import Losses


def bench(
    ctx: typer.Context,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Splits = None,
    objective: flags.Aims = "latency",
    concurrency: flags.Concurrency = "1,4,8",
    num_prompt: flags.NumPrompt = 128,
    num_tokens: flags.NumTokens = 64,
    num_trials: flags.NumTrials = 3,
    decode: flags.Decodes = "ar",
    failover: flags.Failover = False,
    as_json: flags.Json = False,
    wide: flags.Wide = False,
    plot: flags.Plot = None,
) -> int:
    """Throughput and latency of many requests at once, against one process: this code's, and mlx_lm's.

    Prompts are random tokens, all systems get the same ones in turn, and the figures are medians over the trials.
    What does not fit, or cannot be compared, is said in one line and left out.

    Two nodes on this machine, as without --config: brigade bench --local 1 --concurrency 1,4,8,16 --plot bench.png

    Which split is best: brigade bench --config cluster.yaml --layers 20,16 --layers 24,12

    What drafts bring: brigade bench --config cluster.yaml --concurrency 1 --decode ar,ngram,diffusion

    To forecast more requests with `brigade plan --simulate --measured`: brigade bench --concurrency 1 --json > one.json

    How long a stream stands still when a worker is lost: brigade bench --failover
    """
    if failover:
        return _bench_failover(ctx)
    config = find_config(config)
    options = cluster_options(config, model, 1 if config is None and local is None else local, None, None)
    if layers and not options.num_workers:
        raise InputError("layers", "expected workers to split the model over, found none; use --local N or --config")
    decodes = tuple(
        make_decode(kind.strip(), "auto", Decode.entropy_threshold, Decode.position_penalty)
        for kind in decode.split(",")
    )
    counts = parse_counts("concurrency", concurrency, most=MOST_WAITING)
    options = replace(options, objective=objective, num_requests=counts[-1])
    if plot is not None and len(counts) == 1:
        raise InputError("plot", f"expected several --concurrency to draw a line through, found {counts[0]} only")
    splits = tuple(dict.fromkeys(map(parse_layers, layers or []))) or (options.cluster.layers,)

    from coordinator.bench.bench import Workload
    from coordinator.cli.run import run_async

    workload = Workload(counts, num_prompt, num_tokens, decodes, splits, num_trials)
    run_async(run_bench(options, workload, as_json=as_json, is_wide=wide, plot=plot))
    return 0


def _bench_failover(ctx: typer.Context) -> int:
    others = ("config", "layers", "objective", "concurrency", "num_tokens", "decode", "wide", "plot")
    refuse_flags(ctx, others, "not expected with --failover, which loses workers of --local in one answer by ar")
    given = ctx.params
    local = 1 if given["local"] is None else given["local"]
    if not local:
        raise InputError("local", "expected at least one worker, which is lost, got 0")
    contexts = (given["num_prompt"],) if "num_prompt" in given_flags(ctx) else None
    options = cluster_options(None, given["model"], local, None, None)

    from coordinator.bench.failover import CONTEXTS, Losses
    from coordinator.cli.run import run_async

    losses = Losses(contexts or CONTEXTS, given["num_trials"])
    return run_async(run_failover(options, losses, as_json=given["as_json"]))


async def run_bench(
    options: ClusterOptions, workload: "Workload", *, as_json: bool, is_wide: bool = False, plot: Path | None
) -> None:
    """Measure, then print the table or the JSON object; last, where nothing can be lost any more, write the picture.

    Raises:
        BrigadeError: the cluster failed; after what was measured until then is printed.
    """
    from coordinator.bench.bench import measure
    from coordinator.bench.report import check_plot, print_bench, to_markdown, write_plot
    from coordinator.cli.report import require_writable
    from coordinator.cluster.progress import telling_interrupts

    if plot is not None:
        check_plot(plot)
        require_writable("plot", plot)
    with telling_interrupts("interrupted before all was measured: no figures"):
        found = await measure(options, workload)
    if as_json:
        print(json.dumps(found.as_json()), flush=True)
    elif is_wide:
        print(to_markdown(found), flush=True)
    else:
        print_bench(found)
    if plot is not None:
        write_plot(found, plot)
    if found.failure is not None:
        raise found.failure


async def run_failover(options: ClusterOptions, losses: "Losses", *, as_json: bool) -> int:
    """Lose workers, then print the table or the JSON object. The exit code: 1 if a token was another one."""
    from coordinator.bench.failover import measure_failover, print_failover

    failover = await measure_failover(options, losses)
    if as_json:
        print(json.dumps(failover.as_json()))
    else:
        print_failover(failover)
    return 0 if failover.is_equal else 1
