"""From a configuration to a server that answers until it is told to stop. HTTP and gRPC share one event loop."""

import asyncio
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cluster.options import DEFAULT_CONTEXT, ClusterOptions
from coordinator.cluster.progress import say
from coordinator.http.app import make_app
from coordinator.http.keys import Keys
from coordinator.http.listen import answering, listening
from coordinator.http.served import RequestLimits, Served
from coordinator.planning.contexts import Contexts
from coordinator.resident.aside import OneAtATime
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import ResidentModel, Standing, State, open_resident
from coordinator.resident.tally import Tally
from coordinator.resident.watch_log import logged
from worker.config import is_loopback
from worker.errors import BrigadeError, InputError

_ORIGIN = r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+"  # without a path, not even a slash; in small letters
_REOPEN_S = 5.0  # after no chain could be opened for as long as a recovery may take


@dataclass(frozen=True)
class Serving:
    """How the server listens, whom it lets in, and how long anything may take."""

    host: str
    port: int
    keys: Keys | None = None
    insecure: bool = False
    allowed_hosts: Sequence[str] = ()  # names that it is called by, beyond those of this machine
    cors_origins: Sequence[str] = ()  # of web pages that may use it
    names: Sequence[str] = ()
    context: int | None = None  # tokens; None: as many as there is memory for
    max_waiting: int = 256
    shutdown_timeout_s: float = 30.0
    reopen_s: float = _REOPEN_S
    tls: ssl.SSLContext | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # for requests that do not say; above the model's own

    @property
    def is_wide(self) -> bool:
        """Whether other machines can reach it."""
        return not is_loopback(self.host)

    @property
    def hosts(self) -> Sequence[str]:
        """Names by which it may be called; none: by any."""
        if self.is_wide and not self.allowed_hosts:
            return ()
        return ("localhost", "127.0.0.1", "::1", self.host.lower(), *(name.lower() for name in self.allowed_hosts))

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{port}"


async def serve(options: ClusterOptions, serving: Serving) -> None:
    """Answer until cancelled, then end what is under way.

    Raises:
        ConfigError: the port is taken. ModelError, InputError: the model cannot be served.
        BrigadeError: the first chain could not be opened.
    """
    tally = Tally()
    frontend = await Frontend.read(
        options.model,
        trust_remote_code=options.trust_remote_code,
        sampling=serving.sampling,
        max_tokens=serving.limits.max_tokens,
        aside=OneAtATime(max_wait_s=serving.limits.queue_timeout_s, on_refused=tally.refuse),
    )
    served = Served(frontend, serving.names or (_name_of(frontend),), int(time.time()), serving.limits, tally=tally)
    app = make_app(served, keys=serving.keys, hosts=serving.hosts, origins=serving.cors_origins)
    with listening(serving.host, serving.port) as listener:
        url = serving.url(listener.getsockname()[1])
        telling = logged(served.tally, served.watch, lambda: served.model)
        async with telling, answering(app, listener, serving.tls) as answers:
            await _keep_serving(options, serving, served, url, answers)


def _name_of(frontend: Frontend) -> str:
    """What clients call the model: a folder's own name, whose path is nobody's affair."""
    name = frontend.checkpoint.name
    return Path(name).name if Path(name).is_absolute() else name


async def _keep_serving(
    options: ClusterOptions, serving: Serving, served: Served, url: str, answers: "asyncio.Task[None]"
) -> None:
    """Load the model, and anew whenever its cluster has failed for good. Returns once it was told to stop."""
    spec, was_open = served.frontend.spec, False
    context = serving.context or Contexts(min(DEFAULT_CONTEXT, spec.context), spec.context)
    while True:
        try:
            async with open_resident(
                served.frontend,
                options,
                context,
                max_waiting=serving.max_waiting,
                max_wait_s=serving.limits.queue_timeout_s,
                tally=served.tally,
            ) as model:
                await model.expect_grammars()
                served.model, was_open = model, True
                say(f"serving {', '.join(served.names)} at {url}, {room_said(model.context, serving.context)}")
                if await _is_stopped(model, serving, answers):
                    return
        except BrigadeError as error:
            if not was_open:
                raise
            say(f"{error}; trying again in {serving.reopen_s:g} s")
            served.without_model = Standing(State.RECOVERING, str(error))
        finally:
            served.model = None
        await asyncio.sleep(serving.reopen_s)


def room_said(context: int, wished: int | None) -> str:
    """How long a request may be, and that it is not as long as was wished for, if so."""
    said = f"up to {context} tokens per request"
    return f"{said}: the model has no room for {wished}" if wished is not None and wished > context else said


async def _is_stopped(model: ResidentModel, serving: Serving, answers: "asyncio.Task[None]") -> bool:
    """True once it was told to stop and what was under way has ended. Raises what makes the model useless.

    Args:
        answers: what clients are answered by. Cancelled because that has ended, there is nothing to wait for.
    """
    try:
        await model.wait_failed()
        return False
    except asyncio.CancelledError:
        if answers.done():
            raise
        say("stopping: what is under way may end; again to stop at once")
        if not await model.drain(serving.shutdown_timeout_s):
            say(f"some answers have not ended within {serving.shutdown_timeout_s:g} s, and are cut off")
        return True


def require_reachable(serving: Serving) -> None:
    """Raises InputError for names and origins that no request can bring."""
    if "" in [name.strip() for name in serving.names]:
        raise InputError("served_model_name", "expected a name, found none")
    for origin in serving.cors_origins:
        if origin not in ("*", "null") and not re.fullmatch(_ORIGIN, origin):
            raise InputError(
                "cors_origin",
                f"expected an origin as browsers write it, such as https://example.org:8080, got {origin!r}",
            )


def require_guarded(serving: Serving) -> None:
    """Raises InputError for a server that anybody in the network could use."""
    if serving.is_wide and serving.keys is None and not serving.insecure:
        raise InputError(
            "host", f"{serving.host} can be reached by others: expected --api-key-file with it, or --insecure"
        )
    if serving.is_wide and serving.tls is None:
        what = "prompts, answers and keys" if serving.keys else "prompts and answers"
        say(f"warning: {what} travel in clear; give --tls-cert and --tls-key to encrypt them")
