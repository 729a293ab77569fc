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

Model = ResidentModel | None


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
    model: Model = None
    tally: Tally = field(default_factory=Tally)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)  # whether all stages answer: one request at a time
    without_model: Standing = field(default_factory=lambda: Standing(State.LOADING, "the model is being loaded"))
    most_waking: int = 256  # requests that may wait while a model that was let go is read again

    def __post_init__(self) -> None:
        self.watch = Watch(self.tally)
        self.was_there = False  # a model, at least once
        self.wanted = asyncio.Event()  # while it is asleep: somebody asks
        self._settled = asyncio.Event()  # whether there is a model, or is none for now
        self._settled.set()
        self._num_waking = 0

    @property
    def standing(self) -> Standing:
        return self.model.standing if self.model else self.without_model

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
        self.model, self.was_there = model, True
        self._settled.set()

    def lose(self, standing: Standing) -> None:
        """There is no model now, and nobody waits for one."""
        self.model, self.without_model = None, standing
        self._settled.set()

    def fall_asleep(self, why: str) -> None:
        """There is no model until somebody asks: whoever does so waits for it."""
        self.model, self.without_model = None, Standing(State.ASLEEP, why)
        self.watch.forget()
        self.wanted.clear()
        self._settled.clear()

    async def wake_model(self) -> ResidentModel:
        """As `require_model`; one that is asleep is waited for, for as long as it takes to read it.

        Raises:
            Refusal: nothing can be answered. QueueFull: too many wait already.
        """
        if not self._settled.is_set():
            if self._num_waking >= max(1, self.most_waking):
                raise QueueFull(f"{self._num_waking} requests wait for the model to be read again; try again later")
            self.wanted.set()
            self._num_waking += 1
            try:
                await self._settled.wait()
            finally:
                self._num_waking -= 1
        return self.require_model()

    def require_model(self) -> ResidentModel:
        """Raises Refusal (503) while nothing can be answered."""
        standing = self.standing
        if self.model is None or not standing.takes_requests:
            raise unavailable(f"{standing.state.value}: {standing.why}", standing.state.value)
        return self.model

    def require_name(self, name: str | None) -> None:
        """Raises Refusal (404) for a model that is not served here."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise refuse(404, f"expected a model that is served here ({known}), found {name!r}", "model_not_found")
