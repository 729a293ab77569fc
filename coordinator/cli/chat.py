"""`brigade chat`: its flags, and what they amount to."""

from typing import Annotated

import typer

from coordinator.cli import flags
from coordinator.cli.chosen import chosen_cluster, chosen_sampling
from coordinator.cli.refusals import refuse
from coordinator.cli.server_flags import LOADING, ApiKeyFile, ServerUrl
from coordinator.planning.recovery import USUAL
from coordinator.sessions.request import make_sampling

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-m", min=1, help="The most tokens of an answer. (default: as many as fit)"),
]


def chat(
    ctx: typer.Context,
    system_prompt: flags.SystemPrompt = None,
    max_tokens: MaxTokens = None,
    server: ServerUrl = None,
    api_key_file: ApiKeyFile = None,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    check_finite: flags.CheckFinite = False,
    rejoin_timeout: flags.RejoinTimeout = USUAL.rejoin_s,
    recovery_timeout: flags.RecoveryTimeout = USUAL.recovery_s,
    temp: flags.Temp = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    seed: flags.Seed = None,
) -> int:
    """Talk with the model. /help lists what else can be typed; Ctrl-C ends an answer, /exit or Ctrl-D leaves.

    brigade chat --model demo --local 2

    With a server that runs: brigade chat --server http://localhost:9338
    """
    if server is None:
        refuse(ctx, ("api_key_file",), "expected only with --server")
    else:
        refuse(ctx, LOADING, "changes nothing with --server, which has its model loaded")
    sampling = chosen_sampling(ctx)
    make_sampling(**sampling)
    options = chosen_cluster(ctx)

    from coordinator.cluster.templates import TEMPLATES

    if server is None:
        TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.run_async import run_async
    from coordinator.doors.chat import Place, run_chat
    from coordinator.http.keys import first_key
    from coordinator.resident.ask import Ask

    place = Place(options, server, first_key(api_key_file) if api_key_file else None)
    body = sampling | ({"max_tokens": max_tokens} if max_tokens else {})
    return run_async(run_chat(place, Ask((0,), max_tokens, sampling), body, system_prompt))
