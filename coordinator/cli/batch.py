"""`brigade batch`: its flags, and what they amount to."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli import flags
from coordinator.cli.chosen import chosen_cluster, refuse_idle_objective
from coordinator.cli.serve import DefaultMaxTokens
from coordinator.planning.recovery import USUAL

Source = Annotated[Path, typer.Argument(metavar="IN.jsonl", show_default=False, help="Request lines.")]
Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="OUT.jsonl", help="Answer lines are added to this file."),
]


def batch(
    ctx: typer.Context,
    source: Source,
    output: Output,
    max_tokens: DefaultMaxTokens = 4096,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    objective: flags.Aims = "latency",
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    check_finite: flags.CheckFinite = False,
    rejoin_timeout: flags.RejoinTimeout = USUAL.rejoin_s,
    recovery_timeout: flags.RecoveryTimeout = USUAL.recovery_s,
) -> int:
    """Answer a file of requests, as many at once as there is memory for, each as a line of another file.

    A request is a line as OpenAI's batches have them: {"custom_id": "a", "method": "POST", "url":
    "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 100}}, or with /v1/completions. Its `model` is not
    looked at.

    Answers come in the order in which they end. Run again with the same files, it goes on where it stopped: requests
    whose custom_id the output has are not asked again, whether they failed or not. A request that fails is a line with
    an error; the exit code is then 2 (wrong request) or 3.

    brigade batch requests.jsonl -o answers.jsonl --model demo --local 2

    Many requests on Macs of different speeds: brigade batch in.jsonl -o out.jsonl --config cluster.yaml --objective
    throughput
    """
    options = chosen_cluster(ctx)
    refuse_idle_objective(ctx)

    from coordinator.cluster.templates import TEMPLATES

    TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.run_async import run_async
    from coordinator.doors.batch import run_batch

    return run_async(run_batch(options, source, output, max_tokens))
