"""A worker that hangs in the middle of a request: python -m tests.cluster.hanging_worker WHERE [worker's arguments].

WHERE is `engine` (its step never returns) or `loop` (neither does its event loop, so that it answers nobody).
"""

import asyncio
import sys
import time
from typing import Any

from protos.brigade_pb2 import Frame
from worker.cli import worker
from worker.compute.engine import Engine
from worker.process.run import run_command

FIRST_STEP = 40  # that hangs: after the warm-up and some tokens
FOREVER_S = 1e6

_init, _begin = Engine.__init__, Engine.begin


def main() -> None:
    where = sys.argv.pop(1)
    assert where in ("engine", "loop")

    def init(self: Any, *arguments: Any, **keys: Any) -> None:
        self.loop = asyncio.get_running_loop()  # an engine is made where a node is attached: on the event loop
        _init(self, *arguments, **keys)

    def begin(self: Any, frame: Frame, *arguments: Any) -> Any:
        if frame.step >= FIRST_STEP:
            if where == "loop":
                self.loop.call_soon_threadsafe(time.sleep, FOREVER_S)
            time.sleep(FOREVER_S)
        return _begin(self, frame, *arguments)

    Engine.__init__, Engine.begin = init, begin  # type: ignore[method-assign]
    run_command(worker)


if __name__ == "__main__":
    main()
