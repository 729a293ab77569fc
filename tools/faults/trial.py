"""Trial: requests on one cluster, watched step by step while something happens to it, and what a case saw of it."""

import asyncio
import io
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.engine.engine import Engine
from coordinator.engine.tokenizer import Tokenizer
from coordinator.sessions.output import Answer, Output
from coordinator.sessions.request import Request
from worker.errors import BrigadeError

FAR_S = 60.0  # a deadline for what takes seconds where nothing else runs


@dataclass(frozen=True)
class Seen:
    """What became of a case. Times are seconds: from the fault until it was noticed, and between two tokens."""

    what: str
    is_kept: bool  # what was promised
    are_equal: bool | None = None  # the tokens, to those of the unfailed run
    detect_s: float | None = None
    gap_s: float | None = None


class Live:
    """A request under way; does something once it has brought so many pieces (0: never)."""

    def __init__(
        self, engine: Engine, request: Request, tokenizer: Tokenizer, at: int, act: Callable[[], None]
    ) -> None:
        self.pieces: list[Output] = []
        self.began = time.monotonic()
        self._at = at
        self._act = act
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine, request, tokenizer))

    @property
    def times(self) -> list[float]:
        """When its pieces became known, seconds, monotonic."""
        return [piece.at / 1e9 for piece in self.pieces]

    async def wait_pieces(self, count: int) -> None:
        async with asyncio.timeout(FAR_S):
            while len(self.pieces) < count:
                self._changed.clear()
                await self._changed.wait()

    def gap_s(self, lost_at: float) -> float | None:
        """How long the reader got nothing around this moment; None if nothing came after it."""
        after = [at for at in self.times if at > lost_at]
        before = [at for at in self.times if at <= lost_at]
        return after[0] - max(before, default=self.began) if after else None

    async def _read(self, engine: Engine, request: Request, tokenizer: Tokenizer) -> Answer:
        answer = Answer()
        async with aclosing(engine.generate(request, parser=tokenizer.stream(request.stops))) as outputs:
            async for piece in outputs:
                answer.add(piece)
                self.pieces.append(piece)
                self._changed.set()
                if len(self.pieces) == self._at:
                    self._act()
        if len(self.pieces) < self._at:  # drafts held better than in the undisturbed run: these are fewer steps
            self._act()
        return answer


class Trial:
    """Requests on a cluster, and when it was lost."""

    def __init__(self, cluster: Cluster, tokenizer: Tokenizer, said: io.StringIO) -> None:
        self.cluster = cluster
        self.engine: Engine
        self.live: list[Live] = []
        self.fault_at: float | None = None  # seconds, monotonic
        self.lost_at: list[float] = []  # when the coordinator noticed
        self.errors: list[BrigadeError] = []
        self.when_reopened: Callable[[], None] = lambda: None
        self._tokenizer = tokenizer
        self._said = said
        self._lost = asyncio.Event()

    @property
    def said(self) -> str:
        """The lines for the user."""
        return self._said.getvalue()

    @property
    def layers(self) -> list[int]:
        return self.cluster.chain.plan.layers

    async def reopen(self, error: BrigadeError) -> Chain:
        """The next chain, for the engine."""
        self.lost_at.append(time.monotonic())
        self.errors.append(error)
        self._lost.set()
        chain = await self.cluster.reopen(error)
        self.when_reopened()
        return chain

    async def begin(self, requests: Sequence[Request], at: int, fault: Callable[[], None]) -> None:
        """Begin these requests; the fault comes once the first of them has brought so many pieces.

        Returns at once if that is later, else once the first frame is under way.
        """

        def strike() -> None:
            fault()
            self.fault_at = time.monotonic()

        self.live = [
            Live(self.engine, each, self._tokenizer, 0 if number else at, strike)
            for number, each in enumerate(requests)
        ]
        if at == 0:
            while self.engine.scheduler.is_idle:  # noqa: ASYNC110 - a few turns of the loop
                await asyncio.sleep(0)
            strike()

    async def wait_lost(self, within_s: float = FAR_S) -> None:
        async with asyncio.timeout(within_s):
            await self._lost.wait()

    async def answers(self) -> list[Answer]:
        """All of them. Raises what the first one that failed failed with."""
        async with asyncio.timeout(2 * FAR_S):
            return [await live.task for live in self.live]

    async def outcomes(self) -> list[Answer | BaseException]:
        """All of them, or what each failed with."""
        async with asyncio.timeout(2 * FAR_S):
            return await asyncio.gather(*(live.task for live in self.live), return_exceptions=True)

    @property
    def detect_s(self) -> float | None:
        """From the fault, or from the last piece before it was noticed where only the worker knows of the fault."""
        if not self.lost_at:
            return None
        known = [at for live in self.live for at in live.times if at <= self.lost_at[0]]
        since = self.fault_at or max(known, default=None)
        return None if since is None else self.lost_at[0] - since

    def is_noticed_within(self, seconds: float) -> bool:
        return self.detect_s is not None and self.detect_s <= seconds

    @property
    def gap_s(self) -> float | None:
        """The longest that a reader got nothing because of the first loss."""
        gaps = [live.gap_s(self.lost_at[0]) for live in self.live] if self.lost_at else []
        return max((gap for gap in gaps if gap is not None), default=None)

    def seen(
        self, found: Sequence[Answer], expected: Sequence[Answer], *, is_kept: bool = True, also: str = ""
    ) -> Seen:
        """What there is to say of streams that all go on as if nothing had been."""
        are_equal = list(map(_told, found)) == list(map(_told, expected))
        what = ", ".join(filter(None, [self.how, also]))
        return Seen(what, is_kept and are_equal, are_equal, self.detect_s, self.gap_s)

    @property
    def how(self) -> str:
        """How often the chain was lost and by which workers it goes on."""
        if not self.lost_at:
            return "nothing was lost"
        times = {1: "once", 2: "twice"}.get(len(self.lost_at), f"{len(self.lost_at)} times")
        workers = [assignment.name for assignment in self.cluster.chain.plan.assignments[1:]]
        return f"lost {times}, goes on with {' and '.join(workers) or 'no worker'}"


def _told(answer: Answer) -> dict[str, Any]:
    return {"tokens": answer.tokens, "text": answer.text, "finish_reason": answer.finish_reason}
