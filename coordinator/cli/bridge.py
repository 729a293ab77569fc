"""`brigade bridge`: its flags, and what they amount to."""

import typer

from coordinator.cli import flags
from coordinator.cli.chosen import chosen_cluster
from coordinator.planning.recovery import USUAL


def bridge(
    ctx: typer.Context,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    check_finite: flags.CheckFinite = False,
    rejoin_timeout: flags.RejoinTimeout = USUAL.rejoin_s,
    recovery_timeout: flags.RecoveryTimeout = USUAL.recovery_s,
) -> None:
    """Answer requests that come as JSON lines on standard input, many at once, as JSON lines on standard output.

    {"id": "a", "op": "generate", "prompt": "Hi", "max_tokens": 8} gives a line {"id": "a", "text": ..., "tokens": ...}
    per piece, then one with "done": true; or one with "error".

    `generate` takes a prompt as `brigade generate` does, or `prompt_tokens`; `chat` takes `messages`; both the
    parameters of `brigade serve`. `info` tells of the model, `cancel` ends the answer with this id, `quit` ends all.
    Where standard input ends, what is under way is answered first.
    """
    options = chosen_cluster(ctx)

    from coordinator.cluster.templates import TEMPLATES

    TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.run_async import run_async
    from coordinator.doors.bridge import run_bridge

    run_async(run_bridge(options))
