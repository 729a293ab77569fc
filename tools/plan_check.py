"""How near the split that the plan takes for the best is to the best that is measured.

python -m tools.plan_check [--config cluster.yaml | --local 1] [--model demo] [-p 64] [-g 64]

The nodes measure themselves, which says how fast each split would be. `brigade bench` then runs the best of them by
that, its neighbours and equal parts. Prints both figures of each, and how near the plan's comes to the best measured.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from coordinator.bench.bench import Workload, measure
from coordinator.bench.results import CLUSTER
from coordinator.cluster.open import ask_nodes, open_peers, read_model
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.survey import survey
from coordinator.decoding.decode import Decode
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import NO_SPEEDS, Survey
from worker.errors import ConfigError
from worker.model.model_spec import ModelSpec
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_MOST_NODES = 3  # all splits over them are tried on paper
_STEPS = (1, 2)  # layers by which neighbours differ

Split = tuple[int, ...]


def main(
    config: Annotated[Path | None, typer.Option(help="As for `brigade bench`.")] = None,
    local: Annotated[int | None, typer.Option(min=1, max=_MOST_NODES - 1)] = None,
    model: Annotated[str | None, typer.Option()] = None,
    prompt: Annotated[int, typer.Option("-p", min=1)] = 64,
    tokens: Annotated[int, typer.Option("-g", min=2)] = 64,
    trials: Annotated[int, typer.Option("-n", min=1)] = 3,
) -> None:
    """Print a row per split, and how near the plan's comes to the best."""
    options = cluster_options(config, model, 1 if config is None and local is None else local, None, None)
    uvloop.run(_run(options.with_layers(None), prompt, tokens, trials))


async def _run(options: ClusterOptions, num_prompt: int, num_tokens: int, num_trials: int) -> None:
    checkpoint, spec = await read_model(options.model)
    async with open_peers(options, spec) as peers:
        nodes = await ask_nodes(options.cluster, peers)
        known = await survey(checkpoint, options.cluster.coordinator.name, peers, feeds=options.feeds)
    predicted = predict(spec, nodes, known, num_prompt + num_tokens)
    splits = worth_trying(predicted)
    bench = await measure(options, Workload((1,), num_prompt, num_tokens, (Decode("ar"),), splits, num_trials))
    measured = {tuple(row.layers or ()): row.tokens_per_s for row in bench.rows if row.system == CLUSTER}
    print(f"{spec.name} on {machine_name()}\n\n{report(predicted, measured)}")


def predict(spec: ModelSpec, nodes: Sequence[Node], known: Survey, context: int) -> dict[Split, float]:
    """Tokens per second of one request on every split that fits, over all nodes in their order.

    Raises:
        ConfigError: there are too many nodes, or one of them does not know its speed.
    """
    if not known.covers(node.name for node in nodes) or not 2 <= len(nodes) <= _MOST_NODES:
        raise ConfigError(f"expected 2 to {_MOST_NODES} nodes that have measured themselves, found others")
    found = {}
    for split in _all_splits(spec.num_layers, len(nodes)):
        candidate = plan(spec, nodes, NO_SPEEDS, Objective(context, layers=split))
        if candidate.fits and (rate := Prediction(spec, candidate, known).tokens_per_s()):
            found[split] = rate
    return found


def worth_trying(predicted: dict[Split, float]) -> tuple[Split, ...]:
    """The best by prediction, those that differ from it by a layer or two, and the most equal one."""
    best = max(predicted, key=lambda split: predicted[split])
    equal = min(predicted, key=lambda split: max(split) - min(split))
    moved = [
        tuple(count + step * ((i == to) - (i == source)) for i, count in enumerate(best))
        for source, to in itertools.permutations(range(len(best)), 2)
        for step in _STEPS
    ]
    return tuple(dict.fromkeys([best, *(split for split in moved if split in predicted), equal]))


def report(predicted: dict[Split, float], measured: dict[Split, float]) -> str:
    """A Markdown table, the fastest first by what was measured, and the verdict."""
    chosen = max(measured, key=lambda split: predicted[split])
    ranked = sorted(measured, key=lambda split: -measured[split])
    lines = ["| layers | predicted tok/s | measured tok/s |", "| --- | ---: | ---: |"]
    lines += [f"| {'+'.join(map(str, split))} | {predicted[split]:.1f} | {measured[split]:.1f} |" for split in ranked]
    share = measured[chosen] / measured[ranked[0]]
    return "\n".join([*lines, "", f"the plan's split makes {share:.0%} of the best measured one"])


def _all_splits(num_layers: int, num_nodes: int) -> Iterator[Split]:
    for cuts in itertools.combinations(range(1, num_layers), num_nodes - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *cuts, num_layers)))


if __name__ == "__main__":
    run_command(main)
