"""`brigade serve`: keeps a model loaded and answers over HTTP."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.parse import chosen_cluster, chosen_sampling
from coordinator.cluster.log import log_as_json
from coordinator.planning.recovery import USUAL
from coordinator.sessions.request import make_sampling
from worker.errors import InputError

PORT = 9338
DefaultMaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-m", min=1, help="The most tokens of an answer whose request names no number."),
]
_server = partial(typer.Option, rich_help_panel="Server")


def serve(
    ctx: typer.Context,
    host: Annotated[str, _server(help="Where to listen; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, _server(min=0, max=65535, help="0: any free one.")] = PORT,
    api_key_file: flags.ApiKeyFile = None,
    insecure: Annotated[
        bool, _server("--insecure", help="Let others in without keys, on a network you trust.")
    ] = False,
    served_model_name: Annotated[
        list[str] | None, _server(help="What clients call the model; repeatable. (default: its name)")
    ] = None,
    max_waiting: Annotated[int, _server(min=0, help="Requests that may wait for memory; more get 429.")] = 256,
    queue_timeout: Annotated[float, _server(min=0, help="How long each may wait, seconds; then it gets 503.")] = 60.0,
    shutdown_timeout: Annotated[
        float, _server(min=0, help="How long answers may go on once it is told to stop.")
    ] = 30.0,
    heartbeat: Annotated[float, _server(min=0.1, help="How often a silent stream says that it lives, seconds.")] = 10.0,
    keep_alive: Annotated[
        float | None,
        _server(
            metavar="S",
            min=0.1,
            help="Let the model go, on all nodes, once nobody has asked for so long, seconds; the next request waits "
            "until it is read again. (default: never)",
            show_default=False,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _server(
            help="A name that the server is called by, repeatable; requests that name another host get 403. "
            "(default: localhost, or any with --host 0.0.0.0)"
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _server(metavar="URL", help="Let web pages of this origin use the server; repeatable.")
    ] = None,
    tls_cert: Annotated[Path | None, _server(help="Certificate (PEM) to serve HTTPS with.")] = None,
    tls_key: Annotated[Path | None, _server(help="Its key (PEM).")] = None,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    objective: flags.Aims = "latency",
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a prompt and its answer that the plan keeps memory for. (default: as many as fit, up to "
            "the model's length)",
            rich_help_panel=flags.CLUSTER,
        ),
    ] = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    check_finite: flags.CheckFinite = False,
    rejoin_timeout: flags.RejoinTimeout = USUAL.rejoin_s,
    recovery_timeout: flags.RecoveryTimeout = USUAL.recovery_s,
    max_tokens: DefaultMaxTokens = 4096,
    temp: flags.Temp = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
) -> None:
    """Keep the model loaded and answer whoever asks, as OpenAI's API does, until Ctrl-C.

    On this machine: brigade serve --model demo --local 2

    Then: curl localhost:9338/v1/chat/completions -H 'Content-Type: application/json'
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    Layers are where `brigade plan` with the same flags puts them: so that one request is fast, unless told otherwise.
    Where many ask all the time: brigade serve --config cluster.yaml --objective throughput
    """
    ctx.with_resource(log_as_json())
    sampling = chosen_sampling(ctx)
    make_sampling(**sampling)
    options = chosen_cluster(ctx)

    from coordinator.engine.bounded import TEMPLATES

    TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.api.listen import load_tls
    from coordinator.api.serve import ServeOptions
    from coordinator.api.serve import serve as run_server
    from coordinator.api.server import RequestLimits
    from coordinator.cli.run import run_async

    if (tls_cert is None) != (tls_key is None):
        raise InputError("tls_cert", "expected with --tls-key, both or neither")
    serving = ServeOptions(
        host=host,
        port=port,
        keys=_load_keys(api_key_file) if api_key_file else None,
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        names=tuple(served_model_name or ()),
        context=context or options.cluster.context,
        max_waiting=max_waiting,
        shutdown_timeout_s=shutdown_timeout,
        tls=load_tls(tls_cert, tls_key) if tls_cert and tls_key else None,
        limits=RequestLimits(max_tokens=max_tokens, queue_timeout_s=queue_timeout, heartbeat_s=heartbeat),
        keep_alive_s=keep_alive,
        sampling=sampling,
    )
    serving.check()
    with contextlib.suppress(KeyboardInterrupt):  # to be told to stop is how a server ends
        run_async(run_server(options, serving))


def _load_keys(path: Path) -> Any:
    from coordinator.api.auth import is_readable_by_others, load_keys
    from coordinator.cluster.progress import say

    keys = load_keys(path)
    if is_readable_by_others(path):
        say(f"warning: {path} can be read by other users of this machine; chmod 600 {path}")
    return keys
