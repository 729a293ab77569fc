"""How a command runs: its flags come as records, its coroutine runs on uvloop, and a signal ends it in order."""

import asyncio
import functools
import inspect
import signal
from collections.abc import Callable, Coroutine
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import uvloop

from worker.platform.interrupts import SIGNALS, call_soon_or_end, end_interrupted

T = TypeVar("T")


class TakeFlags:
    """Annotates a parameter that is a record of flags: the fields that the command takes, and its own defaults."""

    def __init__(self, *names: str, **defaults: Any) -> None:
        """Without `names` all fields are flags of the command; the others keep their defaults."""
        self.names = names
        self.defaults = defaults


def as_command(function: Callable[..., Any]) -> Callable[..., int | None]:
    """Return a function that typer can read: each field of a record of flags becomes a parameter of its own.

    A coroutine that `function` returns is run to its end; its result is the exit code.
    """
    parameters: list[inspect.Parameter] = []
    records: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        annotation, take = parameter.annotation, TakeFlags()
        if get_origin(annotation) is Annotated and isinstance(get_args(annotation)[1], TakeFlags):
            annotation, take = get_args(annotation)
        if not (isinstance(annotation, type) and is_dataclass(annotation)):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(annotation, include_extras=True)
        empty = inspect.Parameter.empty  # it is required
        taken = [each for each in fields(annotation) if not take.names or each.name in take.names]
        records[parameter.name] = annotation, [each.name for each in taken]
        parameters += (
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=take.defaults.get(each.name, empty if each.default is MISSING else each.default),
                annotation=hints[each.name],
            )
            for each in taken
        )

    @functools.wraps(function)
    def command(**given: Any) -> int | None:
        made = {name: record(**{each: given.pop(each) for each in taken}) for name, (record, taken) in records.items()}
        result = function(**given, **made)
        return run_async(result) if inspect.iscoroutine(result) else result

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def run_async(work: Coroutine[Any, Any, T], *, grace_s: float = 0.0) -> T:
    """Run a coroutine and return its result, also if it ends normally after a signal.

    SIGINT and SIGTERM cancel it, so that it closes what it has opened. A second signal, or the first one if the loop is
    stuck for seconds, ends the process at once; its worker processes notice that and end too.

    Args:
        grace_s: a second signal cancels the coroutine again, and ends the process this much later at the latest; the
            first one waits for a loop that is stuck.
    Raises:
        KeyboardInterrupt: a signal ended it; everything is cleaned up.
    """
    import mlx.core as mx  # not before a command runs: --help does not wait for it

    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        return uvloop.run(_interruptible(work, grace_s))
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        mx.clear_streams()


async def _while_read(work: Coroutine[Any, Any, T]) -> T:
    """Raise BrokenPipeError if standard output is closed: rich raises SystemExit then, which would end the loop."""
    try:
        return await work
    except SystemExit as error:
        raise error.__context__ if isinstance(error.__context__, BrokenPipeError) else error from None


async def _interruptible(work: Coroutine[Any, Any, T], grace_s: float) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(_while_read(work))
    num_signals = 0

    def on_signal(number: int, frame: object) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > (2 if grace_s else 1) or task.done():
            end_interrupted()
        if not grace_s:
            call_soon_or_end(loop, task.cancel)
            return
        if num_signals == 2:
            signal.signal(signal.SIGALRM, on_signal)
            signal.setitimer(signal.ITIMER_REAL, grace_s)
        loop.call_soon_threadsafe(task.cancel)

    for number in SIGNALS:
        signal.signal(number, on_signal)  # not the loop's handlers: a second signal must work while the loop is stuck
    await asyncio.wait([task])
    if num_signals > 1:
        end_interrupted()  # what a second cancellation has left undone would hold the process up
    if num_signals and (task.cancelled() or task.exception()):
        raise KeyboardInterrupt  # an error after the signal comes from it; a normal end stays one
    return task.result()
