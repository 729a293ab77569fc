"""The life of the model behind a server: loaded, loaded anew where its cluster failed, let go while nobody asks."""

import asyncio
import gc
from enum import Enum

from coordinator.cluster.options import DEFAULT_CONTEXT, ClusterOptions
from coordinator.cluster.progress import say
from coordinator.cluster.unload import unload_workers
from coordinator.http.served import Served
from coordinator.http.serving import Serving
from coordinator.planning.contexts import Contexts
from coordinator.resident.model import ResidentModel, Standing, State, open_resident
from worker.errors import BrigadeError
from worker.process.mlx_memory import give_back


class Over(Enum):
    """Why a model is used no more, other than that it failed."""

    STOPPED = "the server was told to stop"
    UNUSED = "nobody asks"


async def keep_serving(
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
            if served.standing.state is State.LOADING:  # there was none yet
                raise
            say(f"{error}; trying again in {serving.reopen_s:g} s")
            served.lose(Standing(State.RECOVERING, str(error)))
            await asyncio.sleep(serving.reopen_s)


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
        return await _wait_over(model, serving, served, answers)


async def _sleep_until_wanted(options: ClusterOptions, served: Served) -> None:
    """Let the model go on every node."""
    await unload_workers(options)
    gc.collect()  # what it was made of leads back to itself here and there
    give_back()
    await served.wait_wanted()
    say(served.standing.why)


def room_said(context: int, wished: int | None) -> str:
    """How long a request may be, and that it is not as long as was wished for, if so."""
    said = f"up to {context} tokens per request"
    return f"{said}: the model has no room for {wished}" if wished is not None and wished > context else said


async def _wait_over(model: ResidentModel, serving: Serving, served: Served, answers: "asyncio.Task[None]") -> Over:
    """Once it was told to stop, and what was under way has ended; or the model has fallen asleep.

    Args:
        answers: what clients are answered by. Cancelled because that has ended, there is nothing to wait for.
    Raises:
        BrigadeError: what makes the model useless.
    """
    try:
        await _fall_asleep(model, served, serving.keep_alive_s)
        return Over.UNUSED
    except asyncio.CancelledError:
        if answers.done():
            raise
        say("stopping: what is under way may end; again to stop at once")
        if not await model.drain(serving.shutdown_timeout_s):
            say(f"some answers have not ended within {serving.shutdown_timeout_s:g} s, and are cut off")
        return Over.STOPPED


async def _fall_asleep(model: ResidentModel, served: Served, keep_alive_s: float | None) -> None:
    """Once nobody has asked for so long; None: never. Raises what makes the model useless."""
    while True:
        await _wait_unused(model, keep_alive_s)
        async with served.looking:
            if not model.use.is_used:  # nobody has come while a look came to its end
                served.fall_asleep(f"nobody asked for {keep_alive_s:g} s; the next request has it read again")
                say(f"asleep: {served.standing.why}")
                return


async def _wait_unused(model: ResidentModel, for_s: float | None) -> None:
    failing = asyncio.create_task(model.wait_failed())
    unused = asyncio.create_task(model.use.wait_unused(for_s))
    try:
        await asyncio.wait([failing, unused], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
    finally:
        failing.cancel()
        unused.cancel()
        await asyncio.gather(failing, unused, return_exceptions=True)
