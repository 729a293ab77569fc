"""A stage's loop by itself, with an engine that takes as long as a test wants."""

import asyncio
import threading
from typing import Any

from protos.brigade_pb2 import Frame, Result, Timing
from worker.node.stage import Stage
from worker.process.mlx_thread import MlxThread


class SlowEngine:
    """Counts what it begins, and finishes once it is let go."""

    num_slots = 1
    runs_ahead = False

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.began, self.release = threading.Event(), threading.Event()

    def begin(self, frame: Frame, received: int) -> Frame:
        self.begun.append(frame.step)
        self.began.set()
        return frame

    def finish(self, frame: Frame) -> Result:
        assert self.release.wait(10)
        return Result(step=frame.step, timings=[Timing()])


async def test_a_stopped_stage_leaves_the_frames_that_wait() -> None:
    """Whoever joins the node next would wait behind them."""
    engine: Any = SlowEngine()
    thread = MlxThread()
    stage = Stage(engine, thread, epoch=1, send=None)
    stage.start()
    for step in range(20):
        stage.submit(Frame(epoch=1, step=step))
    await asyncio.to_thread(engine.began.wait, 10)
    await stage.stop()
    engine.release.set()
    await thread.run(lambda: None)
    thread.close()
    assert engine.begun == [0]
