"""Flow: what the stages were at, frame by frame, in sums that only grow. Pure; a few additions per frame.

A request's waterfall is what these sums grew by while it ran: where others ran beside it, they share their moments.
"""

from collections import deque
from dataclasses import dataclass

from coordinator.sessions.waterfall import PARTS, Moments, Passage, Route

_WINDOW_NS = 10_000_000_000
_MARK_NS = 500_000_000


@dataclass
class StageSums:
    """One stage's sums, nanoseconds. Waits are whole: other frames may have been at work meanwhile."""

    stage: int
    worker: str
    num_frames: int = 0
    compute: int = 0
    wire: int = 0  # of the hop into this stage; on the first one the way back to it
    queue: int = 0
    busy: int = 0  # at work: no moment counts twice
    bubble: int = 0  # had nothing to work on while a frame was on its way
    busy_until: int = 0  # on the coordinator's clock


class Flow:
    """All stages' sums, and the parts of the time in which something was on its way."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0)  # nanoseconds; each moment is in one of them
        self._all: dict[tuple[int, str], StageSums] = {}
        self._now: list[StageSums] = []  # of the present chain
        self._route: Route | None = None
        self._until = 0  # all before is in the parts
        self._marks: deque[tuple[int, list[int]]] = deque()  # moments, and what each stage's `busy` was then

    @property
    def stages(self) -> list[StageSums]:
        """Of every stage that a worker ever was."""
        return list(self._all.values())

    def rest(self, until: int) -> None:
        """Nothing was on its way until this moment: none of it counts."""
        self._until = max(self._until, until)

    def take(self, route: Route, passage: Passage) -> None:
        """Count a frame; the first one of another chain ends a recovery."""
        between = "scheduling"
        if route is not self._route:
            between = "recovery" if self._route else between
            self._begin_chain(route)
        left = passage.timings[0].received - route.offsets[0]
        self._spend(between, left)
        before = self._until
        worked = []
        for sums, moments, offset in zip(self._now, passage.timings, route.offsets, strict=True):
            here = Moments(*(moment - offset for moment in moments))
            self._divide(here, passage.returned, is_first=sums.stage == 0)
            worked.append(_count(sums, here, left))
            left = here.sent
        self._spend("return", passage.returned)
        self._now[0].wire += max(0, passage.returned - left)
        for sums, at_work in zip(self._now, worked, strict=True):
            sums.bubble += max(0, self._until - before - at_work)
        self._mark(passage.returned)

    def utilisation(self, now: int) -> dict[str, float]:
        """By worker of the present chain, each stage's share of the last ten seconds that it was at work."""
        since = [mark for mark in self._marks if mark[0] >= now - _WINDOW_NS]
        if not since or now <= since[0][0]:
            return {sums.worker: 0.0 for sums in self._now}
        began, busy = since[0]
        return {
            sums.worker: min(1.0, (sums.busy - before) / (now - began))
            for sums, before in zip(self._now, busy, strict=True)
        }

    def _begin_chain(self, route: Route) -> None:
        self._route = route
        places = [(stage, node.name) for stage, node in enumerate(route.nodes)]
        self._now = [self._all.setdefault(place, StageSums(*place)) for place in places]
        self._marks.clear()

    def _divide(self, here: Moments, returned: int, *, is_first: bool) -> None:
        """One stage's way, beginning with the hop into it."""
        compute = "coordinator compute" if is_first else "worker compute"
        self._spend("wire", min(here.received, returned))
        self._spend("queue", min(here.taken, returned))
        self._spend("decode", min(here.started, returned))
        self._spend(compute, min(here.computed, returned))
        self._spend("head + sampling", min(here.sampled, returned))
        self._spend("encode", min(here.sent, returned))

    def _spend(self, part: str, until: int) -> None:
        """All from where the parts end until then is of this part; nothing where a clock is wrong."""
        if until > self._until:
            self.parts[part] += until - self._until
            self._until = until

    def _mark(self, now: int) -> None:
        if not self._marks or now - self._marks[-1][0] >= _MARK_NS:
            self._marks.append((now, [sums.busy for sums in self._now]))
        while len(self._marks) > 1 and self._marks[0][0] < now - _WINDOW_NS:
            self._marks.popleft()


def _count(sums: StageSums, here: Moments, left: int) -> int:
    """Add a frame to a stage's sums; how long the stage was at work on it and on no other."""
    sums.num_frames += 1
    sums.wire += max(0, here.received - left)
    sums.queue += max(0, here.taken - here.received)
    sums.compute += max(0, here.sent - here.taken)
    at_work = max(0, here.sent - max(here.taken, sums.busy_until))
    sums.busy_until = max(sums.busy_until, here.sent)
    sums.busy += at_work
    return at_work
