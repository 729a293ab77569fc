"""`brigade serve`: keeps a model loaded and answers over HTTP."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from coordinator.cli import flags, run
from coordinator.cluster.log import log_as_json
from coordinator.cluster.progress import say
from coordinator.engine.bounded import TEMPLATES
from worker.errors import InputError

PORT = 9338
_CUT_OFF_S = 2.0  # after a second signal, for clients to be sent that their answers are cut off
_server = partial(typer.Option, rich_help_panel="Server")


def serve(
    ctx: typer.Context,
    *,
    host: Annotated[str, _server(help="The address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, _server(min=0, max=65535, help="The port; 0: any free one.")] = PORT,
    api_key_file: flags.ApiKeyFile = None,
    insecure: Annotated[
        bool, _server("--insecure", help="Let other machines in without keys, on a network you trust.")
    ] = False,
    served_model_name: Annotated[
        list[str] | None, _server(help="The name of the model for clients; repeatable. (default: its own name)")
    ] = None,
    pooling: Annotated[
        Literal["mean", "last"] | None,
        _server(help="Embed texts by the mean of their tokens' states, or by the last. (default: the model's own way)"),
    ] = None,
    max_waiting: Annotated[int, _server(min=0, help="Requests that may wait for memory; more get 429.")] = 256,
    queue_timeout: Annotated[float, _server(min=0, help="How long each may wait, seconds; then it gets 503.")] = 60.0,
    shutdown_timeout: Annotated[
        float, _server(min=0, help="How long running answers may continue after a signal to stop, seconds.")
    ] = 30.0,
    heartbeat: Annotated[float, _server(min=0.1, help="Seconds between keep-alives of a silent stream.")] = 10.0,
    keep_alive: Annotated[
        float | None,
        _server(
            metavar="S",
            min=0.1,
            help="Unload the model on all nodes after so many seconds without a request; the next request waits "
            "until it is loaded again. (default: never)",
            show_default=False,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _server(
            help="A host name of the server, repeatable; requests for other hosts get 403. "
            "(default: localhost, or any with --host 0.0.0.0)"
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _server(metavar="URL", help="Let web pages of this origin use the server; repeatable.")
    ] = None,
    tls_cert: Annotated[Path | None, _server(help="Certificate (PEM) to serve HTTPS with.")] = None,
    tls_key: Annotated[Path | None, _server(help="Its key (PEM).")] = None,
    cluster: Annotated[
        flags.ClusterFlags, run.TakeFlags(*(name for name in (*flags.SERVING, "objective") if name != "context"))
    ],
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a prompt and its answer that the plan reserves memory for. (default: as many as fit, up to "
            "the model's context)",
            rich_help_panel=flags.CLUSTER,
        ),
    ] = None,
    max_tokens: flags.DefaultMaxTokens = 4096,
    sampling: Annotated[flags.SamplingFlags, run.TakeFlags(*flags.MODELS_OWN)],
) -> None:
    """Keep the model loaded and answer requests to OpenAI's and Anthropic's APIs until Ctrl-C.

    On this machine: brigade serve --model demo --local 2

    Then: curl localhost:9338/v1/chat/completions -H 'Content-Type: application/json'
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    Layers are placed as `brigade plan` with the same flags shows: by default, so that a single request is fast.

    For many requests at once: brigade serve --config cluster.yaml --objective throughput
    """
    ctx.with_resource(log_as_json())
    chosen = sampling.chosen()
    options = replace(cluster, context=context).options()
    TEMPLATES.start()  # in parallel to the imports below, which take a second

    from coordinator.api.auth import is_readable_by_others, load_keys
    from coordinator.api.listen import load_tls
    from coordinator.api.serve import ServeOptions
    from coordinator.api.serve import serve as run_server
    from coordinator.api.server import RequestLimits

    if (tls_cert is None) != (tls_key is None):
        raise InputError("tls_cert", "expected with --tls-key, both or neither")
    keys = load_keys(api_key_file)
    if api_key_file and is_readable_by_others(api_key_file):
        say(f"warning: {api_key_file} can be read by other users of this machine; chmod 600 {api_key_file}")
    serving = ServeOptions(
        host=host,
        port=port,
        keys=keys,
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        names=tuple(served_model_name or ()),
        pooling=pooling,
        max_waiting=max_waiting,
        shutdown_timeout_s=shutdown_timeout,
        tls=load_tls(tls_cert, tls_key) if tls_cert and tls_key else None,
        limits=RequestLimits(max_tokens=max_tokens, queue_timeout_s=queue_timeout, heartbeat_s=heartbeat),
        keep_alive_s=keep_alive,
        sampling=chosen,
    )
    serving.check()
    with contextlib.suppress(KeyboardInterrupt):  # a signal is the normal end of a server
        run.run_async(run_server(options, serving), grace_s=_CUT_OFF_S)
