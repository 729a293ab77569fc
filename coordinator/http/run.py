"""From a configuration to a server that answers until it is told to stop. HTTP and gRPC share one event loop."""

import asyncio
import gc
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from coordinator.cluster.options import DEFAULT_CONTEXT, ClusterOptions
from coordinator.cluster.progress import say
from coordinator.cluster.unload import unload_workers
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
from worker.process.mlx_memory import give_back

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
    keep_alive_s: float | None = None  # how long the model is held while nobody asks; None: for ever
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
    served = Served(
        frontend,
        serving.names or (_name_of(frontend),),
        int(time.time()),
        serving.limits,
        tally=tally,
        most_waking=serving.max_waiting,
    )
    app = make_app(served, keys=serving.keys, hosts=serving.hosts, origins=serving.cors_origins)
    with listening(serving.host, serving.port) as listener:
        url = serving.url(listener.getsockname()[1])
        telling = logged(served.tally, served.watch, lambda: served.model)
        async with telling, answering(app, listener, serving.tls) as answers:
            try:
                await _keep_serving(options, serving, served, url, answers)
            finally:  # whoever still waits for a model is told, before the answers are ended
                served.lose(Standing(State.DRAINING, Over.STOPPED.value))


def _name_of(frontend: Frontend) -> str:
    """What clients call the model: a folder's own name, whose path is nobody's affair."""
    name = frontend.checkpoint.name
    return Path(name).name if Path(name).is_absolute() else name


class Over(Enum):
    """Why a model is used no more, other than that it failed."""

    STOPPED = "the server was told to stop"
    UNUSED = "nobody asks"


async def _keep_serving(
    options: ClusterOptions, serving: Serving, served: Served, url: str, answers: "asyncio.Task[None]"
) -> None:
    """Load the model, and anew whenever its cluster has failed for good, or it was let go and somebody asks.

    Returns once it was told to stop.
    """
    while True:
        try:
            if await _serve_once(options, serving, served, url, answers) is Over.STOPPED:
                return
            await _sleep_until_wanted(options, served)
        except BrigadeError as error:
            if not served.was_there:
                raise
            say(f"{error}; trying again in {serving.reopen_s:g} s")
            served.lose(Standing(State.RECOVERING, str(error)))
            await asyncio.sleep(serving.reopen_s)
        finally:
            served.model = None


async def _serve_once(
    options: ClusterOptions, serving: Serving, served: Served, url: str, answers: "asyncio.Task[None]"
) -> Over:
    """Answer by one model for as long as it is of use. Raises why it could not be opened, or failed."""
    spec = served.frontend.spec
    async with open_resident(
        served.frontend,
        options,
        serving.context or Contexts(min(DEFAULT_CONTEXT, spec.context), spec.context),
        max_waiting=serving.max_waiting,
        max_wait_s=serving.limits.queue_timeout_s,
        tally=served.tally,
    ) as model:
        await model.expect_grammars()
        served.take(model)
        say(f"serving {', '.join(served.names)} at {url}, {room_said(model.context, serving.context)}")
        while await _wait_over(model, serving, answers) is Over.UNUSED:
            async with served.looking:
                if not model.use.is_used:  # nobody has come while a look came to its end
                    served.fall_asleep(
                        f"nobody asked for {serving.keep_alive_s:g} s; the next request has it read again"
                    )
                    return Over.UNUSED
        return Over.STOPPED


async def _sleep_until_wanted(options: ClusterOptions, served: Served) -> None:
    """Let the model go on every node."""
    say(f"asleep: {served.standing.why}")
    await unload_workers(options)
    gc.collect()  # what it was made of leads back to itself here and there
    give_back()
    await served.wanted.wait()
    served.without_model = Standing(State.LOADING, "somebody asks: the model is read again")
    say(served.without_model.why)


def room_said(context: int, wished: int | None) -> str:
    """How long a request may be, and that it is not as long as was wished for, if so."""
    said = f"up to {context} tokens per request"
    return f"{said}: the model has no room for {wished}" if wished is not None and wished > context else said


async def _wait_over(model: ResidentModel, serving: Serving, answers: "asyncio.Task[None]") -> Over:
    """Once it was told to stop, and what was under way has ended; or nobody has asked for so long as it is kept.

    Args:
        answers: what clients are answered by. Cancelled because that has ended, there is nothing to wait for.
    Raises:
        BrigadeError: what makes the model useless.
    """
    try:
        return await _wait_unused(model, serving.keep_alive_s)
    except asyncio.CancelledError:
        if answers.done():
            raise
        say("stopping: what is under way may end; again to stop at once")
        if not await model.drain(serving.shutdown_timeout_s):
            say(f"some answers have not ended within {serving.shutdown_timeout_s:g} s, and are cut off")
        return Over.STOPPED


async def _wait_unused(model: ResidentModel, keep_alive_s: float | None) -> Over:
    failing = asyncio.create_task(model.wait_failed())
    unused = asyncio.create_task(model.use.wait_unused(keep_alive_s)) if keep_alive_s is not None else None
    try:
        await asyncio.wait([task for task in (failing, unused) if task], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            await failing
        return Over.UNUSED
    finally:
        for task in (failing, unused):
            if task:
                task.cancel()


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
