"""The flags that only `plan` has."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.flags import CLUSTER, LOAD

_SIMULATION = "Simulation"

MacsFile = Annotated[
    Path | None,
    typer.Option(
        "--nodes",
        metavar="FILE",
        help="Plan for Macs that are not there: a file of their names, memory for weights and caches, GB/s and links.",
        rich_help_panel=CLUSTER,
    ),
]
Write = Annotated[
    bool,
    typer.Option(
        "--write", help="Add the split to cluster.yaml as `layers:`, for all to keep.", rich_help_panel=CLUSTER
    ),
]
MeasureAgain = Annotated[
    bool,
    typer.Option(
        "--measure-again",
        help="Have the nodes of --config measure themselves, whatever they have kept: after one was given other work, "
        "power or cooling. One that serves tells what it has kept.",
        rich_help_panel=CLUSTER,
    ),
]
PlannedConcurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="1,4,8",
        help="How many requests at once; the largest number is what memory is kept for. (default: memory for one, "
        "speeds of 8; of --simulate 1,2,4,8,16)",
        rich_help_panel=LOAD,
    ),
]
Simulate = Annotated[
    bool,
    typer.Option(
        "--simulate",
        help="Predict throughput and latency with the scheduler that serves requests: from --stage-ms or --measured, "
        "or by what the nodes of --config measure of themselves.",
        rich_help_panel=_SIMULATION,
    ),
]
StageMs = Annotated[
    str | None,
    typer.Option(metavar="26.5,6.5", help="What a frame of one row takes on each stage.", rich_help_panel=_SIMULATION),
]
RowMs = Annotated[
    str | None,
    typer.Option(
        metavar="MS,...",
        help="What each further row of a frame adds; 0 where reading the weights is all that counts, whatever their "
        "number. (default: as published of an M5 Pro and 4-bit weights)",
        rich_help_panel=_SIMULATION,
    ),
]
HopMs = Annotated[
    str,
    typer.Option(
        metavar="MS,...",
        help="Latency after each stage; the last is the way back to the coordinator.",
        rich_help_panel=_SIMULATION,
    ),
]
Gbps = Annotated[
    float | None,
    typer.Option(min=0.001, help="Bandwidth of the hops, Gbit/s. (default: no limit)", rich_help_panel=_SIMULATION),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Take times and load from what `brigade bench --json` printed, for other numbers of requests, too.",
        rich_help_panel=_SIMULATION,
    ),
]
ForecastPrompt = Annotated[
    int | None,
    typer.Option(
        "--num-prompt", "-p", min=1, help="Tokens of each prompt. (default: as measured, or 128)", rich_help_panel=LOAD
    ),
]
ForecastTokens = Annotated[
    int | None,
    typer.Option(
        "--num-tokens", "-g", min=2, help="Tokens of each answer. (default: as measured, or 64)", rich_help_panel=LOAD
    ),
]
