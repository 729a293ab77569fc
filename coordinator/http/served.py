"""Served: what all routes share. The model comes once it is loaded, and goes while it is loaded anew."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.http.errors import refuse, unavailable
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import ResidentModel, Standing, State
from coordinator.resident.tally import Tally
from coordinator.resident.watch import Watch
from worker.errors import QueueFull


@dataclass(frozen=True)
class RequestLimits:
    """What a request may cost, and how long it may take."""

    body_bytes: int = 8 << 20
    max_tokens: int = 4096  # of an answer whose request names no number
    queue_timeout_s: float = 60.0  # that it may wait for memory
    heartbeat_s: float = 10.0  # how often a stream that has nothing to say says that it lives


@dataclass
class Served:
    """The model behind the server, the names that it goes by, and what holds for every request."""

    frontend: Frontend
    names: Sequence[str]  # the first one is told in answers
    started: int  # seconds since 1970
    limits: RequestLimits = field(default_factory=RequestLimits)
    tally: Tally = field(default_factory=Tally)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)  # whether all stages answer: one request at a time
    most_waking: int = 256  # requests that may wait while a model that was let go is read again

    def __post_init__(self) -> None:
        self.watch = Watch(self.tally)
        # what answers, or why nothing does
        self._now: ResidentModel | Standing = Standing(State.LOADING, "the model is being loaded")
        self._changed = asyncio.Event()  # set when `_now` changes; every change has an event of its own
        self._num_waking = 0

    @property
    def model(self) -> ResidentModel | None:
        """What answers, if there is one."""
        return None if isinstance(self._now, Standing) else self._now

    @property
    def standing(self) -> Standing:
        return self._now if isinstance(self._now, Standing) else self._now.standing

    @property
    def is_waited_for(self) -> bool:
        """Whether who asks waits for a model that was let go."""
        return self.standing.state in (State.ASLEEP, State.WAKING)

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for memory."""
        return self.model is not None and self.model.num_waiting > 0

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.model.context if self.model else self.frontend.spec.context

    def take(self, model: ResidentModel) -> None:
        """Answer by this model from now on."""
        self._become(model)

    def lose(self, standing: Standing) -> None:
        """There is no model now, and nobody waits for one."""
        self._become(standing)

    def fall_asleep(self, why: str) -> None:
        """There is no model until somebody asks: whoever does so waits for it."""
        self._become(Standing(State.ASLEEP, why))
        self.watch.forget()

    def wake(self) -> None:
        """Somebody asks: a model that is asleep is to be read again."""
        if self.standing.state is State.ASLEEP:
            self._become(Standing(State.WAKING, "somebody asks: the model is read again"))

    async def wait_wanted(self) -> None:
        """Return once somebody has asked for a model that is asleep."""
        while self.standing.state is State.ASLEEP:
            await self._changed.wait()

    async def wake_model(self) -> ResidentModel:
        """As `require_model`; one that is asleep is waited for, for as long as it takes to read it.

        Raises:
            Refusal: nothing can be answered. QueueFull: too many wait already.
        """
        if self.is_waited_for:
            if self._num_waking >= max(1, self.most_waking):
                raise QueueFull(f"{self._num_waking} requests wait for the model to be read again; try again later")
            self._num_waking += 1
            try:
                await self._wait_awake()
            finally:
                self._num_waking -= 1
        return self.require_model()

    async def _wait_awake(self) -> None:
        while self.is_waited_for:
            self.wake()
            await self._changed.wait()

    def _become(self, now: ResidentModel | Standing) -> None:
        """The one way from a state to another."""
        self._now = now
        self._changed.set()
        self._changed = asyncio.Event()

    def require_model(self) -> ResidentModel:
        """Raises Refusal (503) while nothing can be answered."""
        standing = self.standing
        if self.model is None or not standing.takes_requests:
            raise unavailable(f"{standing.state.word}: {standing.why}", standing.state.word)
        return self.model

    def require_name(self, name: str | None) -> None:
        """Raises Refusal (404) for a model that is not served here."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise refuse(404, f"expected a model that is served here ({known}), found {name!r}", "model_not_found")
