"""The `brigade` command line: flags in, one function of another module out. MLX is imported once a command runs."""

import platform
from dataclasses import replace
from typing import Annotated

import typer

from coordinator.cli import flags, plan_flags
from coordinator.cli.batch import batch
from coordinator.cli.bridge import bridge
from coordinator.cli.cache import cache
from coordinator.cli.chat import chat
from coordinator.cli.chosen import chosen_cluster, refuse_idle_objective
from coordinator.cli.doctor import doctor
from coordinator.cli.generate_command import generate, read_prompt
from coordinator.cli.init import init
from coordinator.cli.keys import keys
from coordinator.cli.launch import launch
from coordinator.cli.logs import logs
from coordinator.cli.nodes import nodes
from coordinator.cli.parse import parse_counts, parse_layers, parse_times
from coordinator.cli.plan_checks import check_plan_flags, check_write
from coordinator.cli.refusals import given_flags, refuse, refuse_idle, require_one_prompt
from coordinator.cli.score import score
from coordinator.cli.serve import serve
from coordinator.cli.smoke import smoke
from coordinator.cli.status import status
from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode import Decode, make_decode
from coordinator.sessions.slots import MOST_WAITING
from worker.cli import worker
from worker.errors import InputError
from worker.process.app import App
from worker.process.own_code import version_of

DEMO_PROMPT = "Tom has 48 apples. He buys 27 more and then gives away 30. How many apples does Tom have?"

app = App(no_args_is_help=True)
app.command()(worker)
app.command()(generate)
app.command()(serve)
app.command()(batch)
app.command()(bridge)
app.command()(chat)
app.command()(score)
app.command()(status)
app.command()(launch)
app.command()(logs)
app.command()(doctor)
app.command()(smoke)
app.command()(nodes)
app.command()(init)
app.add_typer(keys, name="keys")
app.add_typer(cache, name="cache")


def print_version(is_wanted: bool) -> None:
    """What a report of a bug should begin with."""
    if is_wanted:
        others = ", ".join(f"{package} {version_of(package)}" for package in ("mlx", "mlx-lm"))
        print(f"brigade {version_of('brigade')} ({others}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the versions and leave.")
    ] = False,
) -> None:
    """Run one language model on several Macs, token for token the model it would be on one."""


@app.command()
def demo(
    ctx: typer.Context,
    text: flags.Text = None,
    prompt: flags.Prompt = None,
    max_tokens: flags.MaxTokens = 256,
    as_json: flags.Json = False,
) -> None:
    """Two worker processes and this coordinator on loopback, the bundled model, one answer, in windows and without."""
    if text is not None or prompt is not None:
        require_one_prompt(ctx)
    options = cluster_options(None, "demo", 2, None, None)

    from coordinator.cluster.templates import TEMPLATES

    TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.demo import run_demo
    from coordinator.cli.generate import run_generate
    from coordinator.cli.run_async import run_async
    from coordinator.cli.wish import Wish

    asked = DEMO_PROMPT if text is None and prompt is None else read_prompt(text, prompt)
    wish = Wish(prompt=asked, max_tokens=max_tokens, as_json=as_json)
    run_async(run_generate(options, wish) if as_json else run_demo(options, wish))


@app.command()
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


@app.command()
def verify(
    ctx: typer.Context,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    max_tokens: flags.MaxTokens = 32,
    seed: flags.VerifySeed = 0,
    decode: flags.DecodeKind = "ar",
    window: flags.Window = "auto",
    entropy_threshold: flags.EntropyThreshold = Decode.entropy_threshold,
    position_penalty: flags.PositionPenalty = Decode.position_penalty,
    stream: flags.Stream = False,
    as_json: flags.Json = False,
) -> int:
    """Prove that the cluster's tokens are those of mlx-lm's model in one process; exit code 1 if they are not.

    Where that does not fit here, of its layers one after another, read from this machine's disk.
    """
    options = chosen_cluster(ctx)
    decoder = make_decode(decode, window, entropy_threshold, position_penalty)
    refuse_idle(ctx)

    from coordinator.cli.commands import run_verify
    from coordinator.cli.run_async import run_async

    return run_async(run_verify(options, decoder, max_tokens=max_tokens, seed=seed, stream=stream, as_json=as_json))


@app.command()
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
    if wide and as_json:
        raise InputError("wide", "not expected with --json, which holds all columns")
    options = cluster_options(config, model, 1 if config is None and local is None else local, None, None)
    if layers and not options.num_workers:
        raise InputError("layers", "expected workers to split the model over, found none; use --local N or --config")
    decodes = tuple(
        make_decode(kind.strip(), "auto", Decode.entropy_threshold, Decode.position_penalty)
        for kind in decode.split(",")
    )
    counts = parse_counts("concurrency", concurrency, most=MOST_WAITING)
    refuse_idle_objective(ctx)
    if layers:
        refuse(ctx, ("objective",), "changes nothing with --layers, which are measured as they are")
    options = replace(options, objective=objective, num_requests=counts[-1])
    if plot is not None and len(counts) == 1:
        raise InputError("plot", f"expected several --concurrency to draw a line through, found {counts[0]} only")
    splits = tuple(dict.fromkeys(map(parse_layers, layers or []))) or (options.cluster.layers,)

    from coordinator.cli.commands import run_bench
    from coordinator.cli.run_async import run_async
    from coordinator.measure.bench import Workload

    workload = Workload(counts, num_prompt, num_tokens, decodes, splits, num_trials)
    run_async(run_bench(options, workload, as_json=as_json, is_wide=wide, plot=plot))
    return 0


def _bench_failover(ctx: typer.Context) -> int:
    others = ("config", "layers", "objective", "concurrency", "num_tokens", "decode", "wide", "plot")
    refuse(ctx, others, "not expected with --failover, which loses workers of --local in one answer by ar")
    given = ctx.params
    local = 1 if given["local"] is None else given["local"]
    if not local:
        raise InputError("local", "expected at least one worker, which is lost, got 0")
    contexts = (given["num_prompt"],) if "num_prompt" in given_flags(ctx) else None
    options = cluster_options(None, given["model"], local, None, None)

    from coordinator.cli.commands import run_failover
    from coordinator.cli.run_async import run_async
    from coordinator.measure.failover import CONTEXTS, Losses

    losses = Losses(contexts or CONTEXTS, given["num_trials"])
    return run_async(run_failover(options, losses, as_json=given["as_json"]))
