"""`brigade plan`: where each layer would go, how fast that would be, and simulations of it."""

from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group

from coordinator.cli import flags
from coordinator.cli.flags import find_config, parse_counts, parse_times, refuse_flags
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.cluster.tables import fitting, plain_console
from coordinator.planning.plan import PROMPTS, Objective, Plan, misfit
from coordinator.planning.speeds import Survey, format_ms
from coordinator.sessions.admission import MOST_WAITING
from worker.config import ClusterConfig
from worker.errors import ConfigError, InputError
from worker.model.model_spec import ModelSpec
from worker.platform.text import counted, format_bytes
from worker.platform.threads import run_in_thread

if TYPE_CHECKING:  # they import numpy or mlx, for which --help should not wait
    from coordinator.bench.forecast import Assumed
    from coordinator.planning.prediction import PlanReport, Prediction

_COLUMNS = 16  # of the bar that shows a node's layers
_TIMES = ("row_ms", "hop_ms", "gbps")
_LOAD = ("num_prompt", "num_tokens", "prefill_step_size", "canvas", "canvas_steps")

_cluster = partial(typer.Option, rich_help_panel=flags.CLUSTER)
_load = partial(typer.Option, rich_help_panel=flags.LOAD)
_simulation = partial(typer.Option, rich_help_panel="Simulation")


@dataclass(frozen=True)
class SimulationFlags:
    """The times and the load of a forecast."""

    simulate: Annotated[
        bool,
        _simulation(
            "--simulate",
            help="Predict throughput and latency with the product's own scheduler: from --stage-ms or --measured, or "
            "from what the nodes of --config measure of themselves.",
        ),
    ] = False
    stage_ms: Annotated[str | None, _simulation(metavar="26.5,6.5", help="Time of a frame of one row by stage.")] = None
    row_ms: Annotated[
        str | None,
        _simulation(
            metavar="MS,...",
            help="Time that each further row of a frame adds; 0 if only reading the weights takes time. (default: as "
            "published of an M5 Pro and 4-bit weights)",
        ),
    ] = None
    hop_ms: Annotated[
        str, _simulation(metavar="MS,...", help="Latency after each stage; the last leads back to the coordinator.")
    ] = "0.5"
    gbps: Annotated[float | None, _simulation(min=0.001, help="Bandwidth of the hops, Gbit/s. (default: no limit)")] = (
        None
    )
    measured: Annotated[
        Path | None, _simulation(metavar="FILE", help="Take times and load from the output of `brigade bench --json`.")
    ] = None
    concurrency: Annotated[
        str | None,
        _load(
            metavar="1,4,8",
            help="How many requests at once; memory is reserved for the largest number. (default: memory for one, "
            "speeds of 8; with --simulate 1,2,4,8,16)",
        ),
    ] = None
    num_prompt: Annotated[
        int | None, _load("--num-prompt", "-p", min=1, help="Tokens of each prompt. (default: as measured, or 128)")
    ] = None
    num_tokens: Annotated[
        int | None, _load("--num-tokens", "-g", min=2, help="Tokens of each answer. (default: as measured, or 64)")
    ] = None
    prefill_step_size: flags.PrefillStepSize = None
    canvas: Annotated[
        int | None,
        _load(
            metavar="T",
            min=1,
            max=65535,
            help="Block diffusion: T tokens become known together. (default: one per step)",
        ),
    ] = None
    canvas_steps: Annotated[
        int | None, _load(metavar="N", min=1, max=65535, help="Steps of T rows until they are known. (default: T)")
    ] = None

    def counts(self) -> tuple[int, ...]:
        default = "1,2,4,8,16" if self.simulate else "8"
        return parse_counts("concurrency", self.concurrency or default, most=MOST_WAITING)


def plan(
    ctx: typer.Context,
    *,
    cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.SPLIT, "objective")],
    macs: Annotated[
        Path | None,
        _cluster(
            "--nodes",
            metavar="FILE",
            help="Plan for Macs that do not exist yet: a file of their names, memory, GB/s and links.",
        ),
    ] = None,
    write: Annotated[bool, _cluster("--write", help="Add the split to cluster.yaml as `layers:`.")] = False,
    measure_again: Annotated[
        bool,
        _cluster(
            "--measure-again",
            help="Have the nodes of --config measure their speeds again, after a change of load, power or cooling. A "
            "node that serves requests returns its last results.",
        ),
    ] = False,
    simulation: SimulationFlags,
    as_json: flags.JsonFlag = False,
) -> Coroutine[Any, Any, None]:
    """Show where each layer would go and whether it fits; load nothing. With --simulate, show how fast it would be.

    Does it fit, with 16,000 tokens per session: brigade plan --config cluster.yaml --context 16000

    And with other layers on each node: brigade plan --config cluster.yaml --layers 20,16

    After a change of a Mac's load or power: brigade plan --config cluster.yaml --measure-again

    Macs that you may buy, described in nodes.yaml: brigade plan --nodes nodes.yaml --model demo

    Two stages of 26.5 and 6.5 ms: brigade plan --simulate --stage-ms 26.5,6.5 --hop-ms 3,0.3

    From a run with one request, the speed of 16: brigade bench --concurrency 1 --json > one.json; brigade plan
    --simulate --measured one.json --concurrency 16

    From what the nodes measure of themselves: brigade plan --simulate --config cluster.yaml
    """
    if simulation.gbps is not None or (simulation.stage_ms is None and simulation.measured is None):
        cluster = replace(cluster, config=find_config(cluster.config))
    if simulation.simulate:
        _check_simulation(ctx, simulation, cluster.config)
    else:
        refuse_flags(ctx, ("stage_ms", "measured", *_TIMES, *_LOAD), "expected only with --simulate")
    if simulation.measured is not None:
        refuse_flags(ctx, _TIMES, "not expected with --measured, which holds the times")
    if macs is not None:
        refused = "config", "local", "write", "measure_again"
        refuse_flags(ctx, refused, "not expected with --nodes, which lists the nodes")
    if measure_again and (cluster.config is None or cluster.local is not None):
        raise InputError("measure_again", "expected with workers of --config only: this machine alone needs no speeds")
    options = cluster.options()
    if macs is not None and cluster.layers is None:
        options = options.with_layers(None)  # those of cluster.yaml are for its own nodes
    if write:
        _check_write(ctx, cluster.config, options.cluster)
    counts = simulation.counts()
    if not simulation.simulate:
        options = replace(options, num_requests=counts[-1])
        num_sessions = counts[-1] if simulation.concurrency else 1
        to_write = cluster.config if write else None
        return run_plan(
            options, num_sessions, counts, macs=macs, to_write=to_write, anew=measure_again, as_json=as_json
        )

    from coordinator.bench.forecast import Assumed

    assumed = Assumed(
        stage_ms=() if simulation.stage_ms is None else parse_times("stage_ms", simulation.stage_ms, least=0.001),
        row_ms=None if simulation.row_ms is None else parse_times("row_ms", simulation.row_ms),
        hop_ms=parse_times("hop_ms", simulation.hop_ms),
        gbps=simulation.gbps,
        measured=simulation.measured,
        concurrency=counts,
        num_prompt=simulation.num_prompt,
        num_tokens=simulation.num_tokens,
        chunk=simulation.prefill_step_size,
        canvas=(simulation.canvas, simulation.canvas_steps or simulation.canvas) if simulation.canvas else None,
    )
    return run_forecast(options, assumed, as_json=as_json)


def _check_simulation(ctx: typer.Context, given: SimulationFlags, config: Path | None) -> None:
    """Raise InputError unless the times come from flags, from a file, or from the nodes of a configuration."""
    times = "whose times come from --stage-ms, --measured or the nodes of --config"
    refuse_flags(ctx, ("macs",), f"not expected with --simulate, {times}")
    refuse_flags(ctx, ("objective", "write", "measure_again"), "not expected with --simulate")
    if given.canvas_steps is not None and given.canvas_steps > (given.canvas or 0):
        expected = (
            f"expected at most the {given.canvas} places of --canvas" if given.canvas else "expected only with --canvas"
        )
        raise InputError("canvas_steps", f"{expected}, got {given.canvas_steps}")
    has_times = given.stage_ms is not None, given.measured is not None
    if not any(has_times) and config is not None:
        refuse_flags(
            ctx, ("local", *_TIMES), f"not expected with --simulate over {config}, whose nodes measure themselves"
        )
        return
    refuse_flags(
        ctx, ("local", "layers", "context"), "not expected with --simulate, which asks no nodes but those of --config"
    )
    if given.gbps is None:
        refuse_flags(ctx, ("config", "model"), "expected with --simulate only where --gbps needs a model's row size")
    if sum(has_times) != 1:
        raise InputError(
            "simulate",
            "expected either --stage-ms 26.5,6.5, or --measured FILE of `brigade bench --json`, or --config FILE, "
            "whose nodes measure themselves",
        )


def _check_write(ctx: typer.Context, config: Path | None, cluster: ClusterConfig) -> None:
    """Raise InputError if --write has no planned split to add, or no file."""
    if config is None:
        raise InputError("write", "expected with --config FILE, the cluster.yaml to which the split is added")
    refuse_flags(ctx, ("local",), "not expected with --write: no cluster.yaml names these workers")
    refuse_flags(
        ctx,
        ("layers",),
        f"not expected with --write, which adds the planned split: add this one to {cluster.file} yourself",
    )
    if cluster.layers is not None:
        said = f"`layers: [{', '.join(map(str, cluster.layers))}]`"
        raise InputError("write", f"{cluster.file} says {said} already; remove that to have it planned anew")


async def run_plan(
    options: ClusterOptions,
    num_sessions: int,
    counts: Sequence[int],
    *,
    macs: Path | None,
    to_write: Path | None,
    anew: bool = False,
    as_json: bool,
) -> None:
    """Print the plan over the cluster's nodes, or over the `macs` of a file.

    Args:
        num_sessions: for which memory is reserved.
        counts: numbers of requests at once whose speed is printed.
        to_write: the cluster.yaml to which the split is added.
        anew: have the nodes measure their speeds again.
    Raises:
        ConfigError: a file is wrong; or, after the plan was printed, the model does not fit.
    """
    from coordinator.cluster.nodes_file import read_nodes
    from coordinator.cluster.open import ask_nodes, note_context, open_peers, read_model
    from coordinator.cluster.survey import known_speeds
    from coordinator.deploy.cluster_file import require_changeable, write_layers
    from coordinator.planning.prediction import report_plan

    if to_write is not None:
        require_changeable(to_write)
    assumed = None if macs is None else read_nodes(macs)
    checkpoint, spec = await read_model(options.model, options.draft_model)
    note_context(options, spec)
    objective = replace(options.objective_of(spec), num_sessions=num_sessions)
    if assumed is not None:
        nodes, speeds = assumed.nodes, assumed.survey(spec)
        objective = replace(objective, is_order_fixed=assumed.is_order_fixed)
    else:
        async with open_peers(options, spec) as peers:
            nodes = await ask_nodes(options.cluster, peers)
            speeds = await known_speeds(options, checkpoint, peers, anew=anew)
    report = report_plan(spec, nodes, speeds, objective)
    view = _PlanView(spec, report, speeds, objective, counts)
    if as_json:
        flags.print_json(view.as_json())
    else:
        view.print()
    if not report.chosen.plan.fits:
        raise ConfigError(misfit(report.chosen.plan, spec))
    if to_write is not None:
        await run_in_thread(partial(write_layers, to_write, options.cluster, report.chosen.plan))
        say(f"added `layers: {report.chosen.plan.layers}` to {to_write}")


async def run_forecast(options: ClusterOptions, assumed: "Assumed", *, as_json: bool) -> None:
    """Print a forecast per number of requests."""
    from coordinator.bench.forecast import find_times, forecast
    from coordinator.bench.report import print_forecasts

    times = await find_times(options, assumed)
    forecasts = await run_in_thread(lambda: forecast(times, assumed))
    if as_json:
        flags.print_json({"rows": times.rows_are, "simulated": [asdict(found) for found in forecasts]})
    else:
        print_forecasts(forecasts, times)


@dataclass(frozen=True)
class _PlanView:
    """A plan as text and as JSON, with its speed for each of `counts` requests at once."""

    spec: ModelSpec
    report: "PlanReport"
    speeds: Survey
    objective: Objective
    counts: Sequence[int]

    def as_json(self) -> dict[str, Any]:
        """Return the object of `plan --json`."""
        times = self.report.chosen
        chosen = times.plan
        names = ("start", "end", "weight_bytes", "cache_bytes", "scratch_bytes", "memory_bytes", "fits")
        nodes = [
            {"node": node.name} | {name: getattr(node, name) for name in names} | {"stage_ms": stage, "hop_ms": hop}
            for node, stage, hop in zip(chosen.assignments, times.stage_ms, times.hop_ms, strict=True)
        ]
        alternatives = [
            {
                "name": name, "nodes": each.plan.names, "layers": each.plan.layers, "fits": each.plan.fits,
                "ms_per_token": each.ms_per_token, "tokens_per_s_at": self._rates(each),
            } | _prefills(each)
            for name, each in self.report.alternatives.items()
        ]  # fmt: skip
        return {
            "model": self.spec.name,
            "num_layers": self.spec.num_layers,
            "context": chosen.context,
            "sessions": chosen.num_sessions,
            "fits": chosen.fits,
            "objective": self.objective.goal,
            "layers": chosen.layers,
            "prompt_end": chosen.prompt_end,
            "nodes": nodes,
            "left_out": list(self.report.left_out),
            "ms_per_token": times.ms_per_token,
            "tokens_per_s": times.tokens_per_s(),
            "tokens_per_s_at": self._rates(times),
            **_prefills(times),
            "alternatives": alternatives,
            "advice": self.report.advice,
        }

    def print(self) -> None:
        """Print a row per node, with its layers drawn to scale, then times, alternatives and advice."""
        console = plain_console()
        times = self.report.chosen
        chosen = times.plan
        size = format_bytes(self.spec.shard_bytes(0, self.spec.num_layers))
        sessions = f"{chosen.num_sessions} sessions" if chosen.num_sessions > 1 else "one session"
        console.print(
            f"{self.spec.name} ({self.spec.family}): {counted(self.spec.num_layers, 'layer')}, {size}, "
            f"{sessions} of {chosen.context} tokens"
        )
        console.print(self._layers(console.width))
        if times.ms_per_step is None:  # nothing else is known
            if self.report.advice:
                console.print(f"\n{self.report.advice}")
            return
        rows = []
        for name, stage_ms, hop_ms in zip(chosen.names, times.stage_ms, times.hop_ms, strict=True):
            speed = self.speeds.speeds[name]
            how = "measured" if speed.is_measured else "assumed"
            rows.append([name, f"{speed.gbps:.3g} GB/s", how, format_ms(stage_ms or 0.0), format_ms(hop_ms or 0.0)])
        table = fitting(("node", "reads", "", "stage", "hop behind it"), rows, console.width)
        console.print("", table, f"\n{self._speed_line()}\n", sep="\n")
        if self.report.alternatives:
            console.print(self._alternatives(console.width), "", sep="\n")
        console.print(self.report.advice)

    def _rates(self, times: "Prediction") -> dict[str, float | None]:
        return {str(count): times.tokens_per_s(count) for count in self.counts}

    def _layers(self, width: int) -> Group:
        """Return a row per node, with a bar that stands where its layers are if there is room for it."""
        nodes = self.report.chosen.plan.assignments
        scratch = ["scratch"] if any(node.scratch_bytes for node in nodes) else []
        heads = ["node", "layers", "weights", "cache", *scratch, "budget", "fits"]
        rows, bars = [], []
        for node in nodes:
            begin, end = (round(_COLUMNS * edge / self.spec.num_layers) for edge in (node.start, node.end))
            bars.append(" " * begin + "━" * (end - begin))
            rows.append([
                node.name, f"[{node.start}, {node.end})", format_bytes(node.weight_bytes),
                format_bytes(node.cache_bytes), *(format_bytes(node.scratch_bytes) for _ in scratch),
                format_bytes(node.memory_bytes), "yes" if node.fits else "NO",
            ])  # fmt: skip
        drawn = fitting([*heads, ""], [[*row, bar] for row, bar in zip(rows, bars, strict=True)], width)
        return drawn if len(drawn.renderables) == 1 else fitting(heads, rows, width)

    def _speed_line(self) -> str:
        """Return the speed of one request, of several, and of a prompt."""
        times = self.report.chosen
        chosen = times.plan
        is_measured = all(self.speeds.speeds[name].is_measured for name in chosen.names)
        least = "" if is_measured else "at least "  # several rows may cost less than assumed
        several = ", ".join(f"{least}{times.steps_per_s(n) or 0.0:.1f} of {n} at once" for n in self.counts if n > 1)
        known = [(num, took) for num in PROMPTS if (took := times.prefill_s(num)) is not None]
        prompts = ", ".join(f"{num} tokens in {took:.1f} s ({num / took:.0f} tok/s)" for num, took in known)
        each = f"{format_ms(times.ms_per_step or 0.0)} per {times.step} after {chosen.context} tokens"
        return f"{each}: {times.steps_per_s():.1f} {times.rate} of one request{several and f', {several}'}" + (
            f"\nprompts: {prompts or 'unknown'}" if self._prompts else ""
        )

    @property
    def _prompts(self) -> list[int]:
        """The prompts that the model has room for."""
        return [num for num in PROMPTS if num <= self.spec.context]

    def _alternatives(self, width: int) -> Group:
        """Return a row per alternative: its times for one request or several, and whether it fits."""
        most = self.objective.requests_at_once
        times = self.report.chosen
        several = [f"{times.rate} of {most}"] if most > 1 else []
        prompts = [f"{'prompt ' * (num == PROMPTS[0])}{num // 1000}k" for num in self._prompts]
        rows = []
        alike: dict[Plan, list[str]] = defaultdict(list)
        for name, each in self.report.alternatives.items():
            alike[each.plan].append(name)
        for names in alike.values():
            each = self.report.alternatives[names[0]]
            ms, rate = each.ms_per_step, each.steps_per_s(most)
            speeds = ["-" if ms is None else format_ms(ms), "-" if rate is None else f"{rate:.1f}"]
            layers, fits = "+".join(map(str, each.plan.layers)), "yes" if each.plan.fits else "NO"
            prefills = ["-" if took is None else f"{took:.1f} s" for took in map(each.prefill_s, self._prompts)]
            rows.append([", ".join(names), layers, *speeds[: 1 + (most > 1)], *prefills, fits])
        return fitting(["instead", "layers", f"per {times.step}", *several, *prompts, "fits"], rows, width)


def _prefills(times: "Prediction") -> dict[str, float | None]:
    return {f"prefill_s_{num}": times.prefill_s(num) for num in PROMPTS}
