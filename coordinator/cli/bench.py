"""`brigade bench`: measures throughput and latency, and what the loss of a worker costs."""

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.flags import find_config, given_flags, parse_counts, parse_layers, refuse_drafter, refuse_flags
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.progress import telling_interrupts
from coordinator.decoding.decode_options import make_decode
from coordinator.sessions.admission import MOST_WAITING
from worker.errors import InputError

if TYPE_CHECKING:  # they import mlx, for which --help should not wait
    from coordinator.bench.bench import Workload

_load = partial(typer.Option, rich_help_panel=flags.LOAD)
_output = partial(typer.Option, rich_help_panel="Output")


def bench(
    ctx: typer.Context,
    *,
    cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.MODEL, "local", "objective")],
    layers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="3,2,1",
            help="Layers per node, coordinator first; repeat it to compare splits. (default: planned)",
            rich_help_panel=flags.CLUSTER,
        ),
    ] = None,
    concurrency: Annotated[str, _load(metavar="1,4,8", help="How many requests at once, one case each.")] = "1,4,8",
    num_prompt: Annotated[int, _load("--num-prompt", "-p", min=1, help="Tokens of each prompt.")] = 128,
    num_tokens: Annotated[int, _load("--num-tokens", "-g", min=2, help="Tokens of each answer.")] = 64,
    num_trials: Annotated[int, _load("--num-trials", "-n", min=1, help="Trials of each; medians are shown.")] = 3,
    prompts: Annotated[
        str | None,
        _load(metavar="2048,16384", help="Also time prompts of these lengths, one request at a time."),
    ] = None,
    decode: Annotated[str, _load(metavar="ar,ngram,...", help="Decoders, as for `generate`.")] = "ar",
    failover: Annotated[
        bool,
        typer.Option(
            "--failover",
            help="Kill, or stop, the last worker of --local in the middle of an answer, and measure how long the "
            "answer pauses; -p is the number of tokens known by then. (default: from 128 to 4096)",
        ),
    ] = False,
    as_json: flags.JsonFlag = False,
    wide: Annotated[
        bool,
        _output("--wide", help="All columns, as Markdown: percentiles, shares of stages, bytes sent, predictions."),
    ] = False,
    plot: Annotated[
        Path | None, _output(help="Draw throughput and latency over --concurrency to this image file.")
    ] = None,
) -> Coroutine[Any, Any, int]:
    """Measure throughput and latency of many requests at once, against one process of this code and of mlx_lm.

    Prompts are random tokens, the same for all systems, and the figures are medians over the trials. A case that does
    not fit or cannot be compared is left out, with a line that says so.

    Two nodes on this machine, as without --config: brigade bench --local 1 --concurrency 1,4,8,16 --plot bench.png

    Compare splits: brigade bench --config cluster.yaml --layers 20,16 --layers 24,12

    Compare decoders: brigade bench --config cluster.yaml --concurrency 1 --decode ar,ngram,diffusion

    Time long prompts, too: brigade bench --config cluster.yaml --concurrency 1 --prompts 2048,16384,65536

    To forecast more requests with `brigade plan --simulate --measured`: brigade bench --concurrency 1 --json > one.json

    Measure how long an answer pauses when a worker is lost: brigade bench --failover
    """
    local, model = cluster.local, cluster.model
    if as_json:
        refuse_flags(ctx, ("wide",), "not expected with --json, which prints one object")
    if failover:
        of_requests = ("concurrency", "num_tokens", "prompts", "decode")
        others = ("config", "draft_model", "layers", "objective", *of_requests, "wide", "plot")
        refuse_flags(ctx, others, "not expected with --failover, which loses workers of --local in one answer by ar")
        if local == 0:
            raise InputError("local", "expected at least one worker, which is lost, got 0")
        contexts = (num_prompt,) if "num_prompt" in given_flags(ctx) else None
        return run_failover(cluster_options(None, model, local or 1), contexts, num_trials, as_json=as_json)
    config = find_config(cluster.config)
    local = 1 if config is None and local is None else local
    options = cluster_options(config, model, local, draft_model=cluster.draft_model, objective=cluster.objective)
    if layers and not options.num_workers:
        raise InputError("layers", "expected workers to split the model over, found none; use --local N or --config")
    decodes = tuple(make_decode(kind.strip()) for kind in decode.split(","))
    refuse_drafter(ctx, [each.kind for each in decodes])
    counts = parse_counts("concurrency", concurrency, most=MOST_WAITING)
    options = replace(options, num_requests=counts[-1])
    if plot is not None and len(counts) == 1:
        raise InputError("plot", f"expected several --concurrency to draw a line through, found {counts[0]} only")
    splits = tuple(dict.fromkeys(map(parse_layers, layers or []))) or (options.cluster.layers,)

    from coordinator.bench.bench import Workload

    lengths = () if prompts is None else parse_counts("prompts", prompts)
    workload = Workload(counts, num_prompt, num_tokens, decodes, splits, num_trials, lengths)
    return run_bench(options, workload, as_json=as_json, is_wide=wide, plot=plot)


async def run_bench(
    options: ClusterOptions, workload: "Workload", *, as_json: bool, is_wide: bool = False, plot: Path | None
) -> int:
    """Measure, print the table or the JSON object, and write the picture last, when nothing can be lost any more.

    Raises:
        BrigadeError: the cluster failed; the results so far are printed first.
    """
    from coordinator.bench.bench import measure
    from coordinator.bench.report import check_plot, print_bench, to_markdown, write_plot

    if plot is not None:
        check_plot(plot)
    with telling_interrupts("interrupted before all was measured: no figures"):
        found = await measure(options, workload)
    if as_json:
        flags.print_json(found.as_json())
    elif is_wide:
        print(to_markdown(found), flush=True)
    else:
        print_bench(found)
    if plot is not None:
        write_plot(found, plot)
    if found.failure is not None:
        raise found.failure
    return 0


async def run_failover(
    options: ClusterOptions, contexts: Sequence[int] | None, num_trials: int, *, as_json: bool
) -> int:
    """Lose workers, then print the table or the JSON object. Return the exit code: 1 if any token differed."""
    from coordinator.bench.failover import CONTEXTS, measure_failover
    from coordinator.bench.report import print_failover

    failover = await measure_failover(options, contexts or CONTEXTS, num_trials)
    if as_json:
        flags.print_json(failover.as_json())
    else:
        print_failover(failover)
    return 0 if failover.is_equal else 1
