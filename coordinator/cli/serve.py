"""`brigade serve`: its flags, and what they amount to."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.chosen import chosen_cluster, chosen_sampling, refuse_idle_objective
from coordinator.cli.server_flags import ApiKeyFile
from coordinator.planning.recovery import USUAL
from coordinator.sessions.request import make_sampling
from worker.errors import InputError

PORT = 9338
_SERVER = "Server"

Host = Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.", rich_help_panel=_SERVER)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.", rich_help_panel=_SERVER)]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Let others in without keys, on a network you trust.", rich_help_panel=_SERVER),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(help="What clients call the model; repeatable. (default: its name)", rich_help_panel=_SERVER),
]
MaxWaiting = Annotated[
    int, typer.Option(min=0, help="Requests that may wait for memory; more get 429.", rich_help_panel=_SERVER)
]
QueueTimeout = Annotated[
    float, typer.Option(min=0, help="How long each may wait, seconds; then it gets 503.", rich_help_panel=_SERVER)
]
ShutdownTimeout = Annotated[
    float, typer.Option(min=0, help="How long answers may go on once it is told to stop.", rich_help_panel=_SERVER)
]
Heartbeat = Annotated[
    float,
    typer.Option(min=0.1, help="How often a silent stream says that it lives, seconds.", rich_help_panel=_SERVER),
]
KeepAlive = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        min=0.1,
        help="Let the model go, on all nodes, once nobody has asked for so long, seconds; the next request waits until "
        "it is read again. (default: never)",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="A name that the server is called by, repeatable; requests that name another host get 403. "
        "(default: localhost, or any with --host 0.0.0.0)",
        rich_help_panel=_SERVER,
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL", help="Let web pages of this origin use the server; repeatable.", rich_help_panel=_SERVER
    ),
]
TlsCert = Annotated[Path | None, typer.Option(help="Certificate (PEM) to serve HTTPS with.", rich_help_panel=_SERVER)]
TlsKey = Annotated[Path | None, typer.Option(help="Its key (PEM).", rich_help_panel=_SERVER)]
Context = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of a prompt and its answer that the plan keeps memory for. (default: as many as fit, up to the "
        "model's length)",
        rich_help_panel="Cluster",
    ),
]
DefaultMaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", "-m", min=1, help="The most tokens of an answer whose request names no number."),
]


def serve(
    ctx: typer.Context,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    api_key_file: ApiKeyFile = None,
    insecure: Insecure = False,
    served_model_name: ServedModelName = None,
    max_waiting: MaxWaiting = 256,
    queue_timeout: QueueTimeout = 60.0,
    shutdown_timeout: ShutdownTimeout = 30.0,
    heartbeat: Heartbeat = 10.0,
    keep_alive: KeepAlive = None,
    allowed_host: AllowedHost = None,
    cors_origin: CorsOrigin = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    objective: flags.Aims = "latency",
    context: Context = None,
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
    sampling = chosen_sampling(ctx)
    make_sampling(**sampling)
    options = chosen_cluster(ctx)
    refuse_idle_objective(ctx)

    from coordinator.cluster.log import log_as_json
    from coordinator.cluster.templates import TEMPLATES

    ctx.with_resource(log_as_json())
    TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.run_async import run_async
    from coordinator.http.listen import load_tls
    from coordinator.http.run import serve as run_server
    from coordinator.http.served import RequestLimits
    from coordinator.http.serving import Serving, require_guarded, require_reachable

    if (tls_cert is None) != (tls_key is None):
        raise InputError("tls_cert", "expected with --tls-key, both or neither")
    serving = Serving(
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
    require_reachable(serving)
    require_guarded(serving)
    with contextlib.suppress(KeyboardInterrupt):  # to be told to stop is how a server ends
        run_async(run_server(options, serving))


def _load_keys(path: Path) -> Any:
    from coordinator.cluster.progress import say
    from coordinator.http.keys import is_readable_by_others, load_keys

    keys = load_keys(path)
    if is_readable_by_others(path):
        say(f"warning: {path} can be read by other users of this machine; chmod 600 {path}")
    return keys
