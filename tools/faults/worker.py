"""A worker with a failpoint: python -m tools.faults.worker NAME[@WHEN] [worker's arguments]. The product has none.

WHEN is the step at which it fails, a token that is fed (`token=17`, or `token=17:40` for position 40 only), or a
number of seconds. A step or a token fails once in the life of a process, unless the process ends by it.

    loop@40         the main event loop never returns, so no call is answered; the engine stops too
    engine@40       the engine never returns from its step, nor does the loop of its thread; the main event loop answers
    mute@40         frames are computed, and nothing is handed on
    crash@token=17  the process is killed
    nan@40          NaN is written over what the step makes
    memory@40       MLX says that there is no memory
    load@3          every load takes 3 s longer
    join            the process is killed whenever it is to join a chain
    start           the process ends before it listens
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import mlx.core as mx

from protos.brigade_pb2 import Frame, Window
from worker.cli import worker
from worker.compute.batching import LaneWindow
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.drafters.kinds import DrafterPart
from worker.node import lifecycle
from worker.node.attachment import Attachment
from worker.node.stage import Stage
from worker.platform.run import run_command

_FOREVER_S = 1e6


def main() -> None:
    name, _, when = sys.argv.pop(1).partition("@")
    FAILPOINTS[name](when)
    run_command(worker)


class When:
    """A step, or a token and perhaps its position: fulfilled once."""

    def __init__(self, text: str) -> None:
        kind, _, value = text.rpartition("=")
        number, _, position = value.partition(":")
        self._is_token, self._number = kind == "token", int(number)
        self._position = int(position) if position else None
        self._has_come = False

    def fulfilled_by(self, frame: Frame) -> list[int]:
        """The numbers of the windows that fulfil it, if none has before."""
        found = [number for number, window in enumerate(frame.windows) if self._is_it(frame.step, window)]
        if self._has_come or not found:
            return []
        self._has_come = True
        return found

    def _is_it(self, step: int, window: Window) -> bool:
        if not self._is_token:
            return step >= self._number
        fed = enumerate(window.tokens, window.base)
        return any(token == self._number and self._position in (None, at) for at, token in fed)


def before_steps(when: str, fail: Callable[[Executor, list[int]], None]) -> None:
    """Have an engine do this before the step; it is given the numbers of the windows that it is about."""
    begin, awaited = Executor.begin, When(when)

    def failing(engine: Executor, frame: Frame, *arguments: Any) -> Any:
        if windows := awaited.fulfilled_by(frame):
            fail(engine, windows)
        return begin(engine, frame, *arguments)

    patch(Executor, "begin", failing)


def block_loop(when: str) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    start = Stage.start

    async def noting(stage: Stage, *arguments: Any) -> None:
        loops.append(asyncio.get_running_loop())
        await start(stage, *arguments)

    def block(engine: Executor, windows: list[int]) -> None:
        loops[-1].call_soon_threadsafe(time.sleep, _FOREVER_S)
        time.sleep(_FOREVER_S)

    patch(Stage, "start", noting)
    before_steps(when, block)


def never_reply(when: str) -> None:
    mute: set[Executor] = set()  # a stage with another engine, of the next chain, speaks
    put_out = Stage._put_out

    def put_unless_mute(stage: Stage, step: int, output: Any) -> None:
        if stage.executor not in mute:
            put_out(stage, step, output)

    patch(Stage, "_put_out", put_unless_mute)
    before_steps(when, lambda engine, windows: mute.add(engine))


def write_nan(when: str) -> None:
    spoiled: list[list[int]] = []  # windows of the next pass
    run = Shard.__call__

    def spoil(shard: Shard, x: mx.array, places: Sequence[LaneWindow], *ids: Any) -> mx.array:
        h = run(shard, x, places, *ids)
        if spoiled:
            windows = spoiled.pop()
            is_spoiled = [number in windows for number, place in enumerate(places) for _ in range(place.num_rows)]
            h = mx.where(mx.array(is_spoiled)[:, None], mx.nan, h).astype(h.dtype)
        return h

    patch(Shard, "__call__", spoil)
    before_steps(when, lambda engine, windows: spoiled.append(windows))


def lack_memory(engine: Executor, windows: list[int]) -> NoReturn:
    raise RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")


def load_slowly(seconds: str) -> None:
    load = lifecycle.load_shard

    async def slow(*arguments: Any) -> DrafterPart:
        await asyncio.sleep(float(seconds))
        return await load(*arguments)

    patch(lifecycle, "load_shard", slow)


def end_as_it_joins(when: str) -> None:
    async def join(attachment: Attachment, *arguments: Any) -> None:
        kill_oneself()

    patch(Attachment, "open", join)


def patch(owner: object, name: str, value: Callable[..., Any]) -> None:
    """Have this done instead, for the life of the process."""
    setattr(owner, name, value)


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAILPOINTS: dict[str, Callable[[str], None]] = {
    "loop": block_loop,
    "engine": partial(before_steps, fail=lambda engine, windows: time.sleep(_FOREVER_S)),
    "mute": never_reply,
    "crash": partial(before_steps, fail=lambda engine, windows: kill_oneself()),
    "nan": write_nan,
    "memory": partial(before_steps, fail=lack_memory),
    "load": load_slowly,
    "join": end_as_it_joins,
    "start": lambda when: sys.exit("ends as it starts"),
}

if __name__ == "__main__":
    main()
