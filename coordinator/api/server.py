"""The one record of a server: its state and its engine, and what holds for every request."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.api.errors import HttpError
from coordinator.api.left_out import SeenNames
from coordinator.engine.engine import Engine, ServerState, ServerStatus
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.one_at_a_time import OneAtATime
from coordinator.engine.stats import Stats
from coordinator.engine.status import ClusterStatus
from coordinator.sessions.request import PoolingKind
from worker.errors import InternalError, QueueFull
from worker.platform.text import counted

DEEP_S = 5.0  # within which a token has to pass all stages
# The server's own states, and those that may follow each. They hold while no engine is open; READY means that one is,
# and then the engine's status holds instead.
_NEXT: Mapping[ServerState, frozenset[ServerState]] = {
    ServerState.LOADING: frozenset({ServerState.READY, ServerState.DRAINING}),
    ServerState.READY: frozenset({ServerState.ASLEEP, ServerState.RECOVERING, ServerState.DRAINING}),
    ServerState.ASLEEP: frozenset({ServerState.WAKING, ServerState.DRAINING}),
    ServerState.WAKING: frozenset({ServerState.READY, ServerState.RECOVERING, ServerState.DRAINING}),
    ServerState.RECOVERING: frozenset({ServerState.READY, ServerState.RECOVERING, ServerState.DRAINING}),
    ServerState.DRAINING: frozenset({ServerState.DRAINING}),
}
_WAITED_FOR = (ServerState.LOADING, ServerState.ASLEEP, ServerState.WAKING)


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request: its size, its answer and its time."""

    body_bytes: int = 8 << 20
    max_tokens: int = 4096  # of an answer whose request gives no number
    queue_timeout_s: float = 60.0  # that it may wait for memory
    heartbeat_s: float = 10.0  # after which a silent stream sends a comment


class Server:
    """The one record of a server: its state, its engine while one is open, and what holds for all requests."""

    def __init__(
        self,
        inputs: InputProcessor,
        names: Sequence[str],
        limits: RequestLimits | None = None,
        *,
        answers_any_name: bool = False,
        stats: Stats | None = None,
        max_waking: int = 256,
        pooling: PoolingKind | None = None,
    ) -> None:
        """Begin as LOADING.

        Args:
            names: of the model; an answer carries the one that its request gives, else the first.
            answers_any_name: requests may give other names, too.
            max_waking: requests that may wait while the model is loaded; at least one always may.
            pooling: of embeddings; None: as the model's files say.
        """
        self.inputs = inputs
        self.names = names
        self._answers_any_name = answers_any_name
        self.pooling = pooling
        self.seen = SeenNames()
        self.started = int(time.time())
        self.limits = limits or RequestLimits()
        self.stats = stats or Stats()
        self.long_bodies = OneAtATime(max_wait_s=self.limits.queue_timeout_s, on_refused=self.stats.refuse)
        self.status = ClusterStatus(self.stats)
        self.engine: Engine | None = None
        self.probing = asyncio.Lock()  # one deep health check at a time
        self._own = ServerStatus(ServerState.LOADING, "the model is being loaded")
        self._changed = asyncio.Event()  # of the present state: set when it ends
        self._max_waking = max(1, max_waking)
        self.num_waking = 0

    def _status(self) -> ServerStatus:
        """Return the engine's status, or the server's own while none is open."""
        return self.engine.status if self.engine else self._own

    @property
    def state(self) -> ServerState:
        return self._status().state

    @property
    def why(self) -> str:
        """Why it is not READY."""
        return self._status().why

    @property
    def why_in_full(self) -> str:
        """The same with what failed on nodes that are left out."""
        status = self._status()
        return "; ".join(filter(None, [status.why, status.failures]))

    @property
    def answers_now(self) -> bool:
        """Whether a request need not wait for a load or for the end of a recovery, except that of a sleeping model."""
        return self.state in (ServerState.READY, ServerState.DEGRADED, ServerState.ASLEEP)

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.engine.context if self.engine else self.inputs.spec.context

    def open(self, engine: Engine) -> None:
        """Answer by this engine from now on."""
        self.become(ServerState.READY, engine=engine)

    def fail(self, why: str) -> None:
        """Refuse requests: there is no engine until another attempt to open one succeeds."""
        self.become(ServerState.RECOVERING, why)

    def sleep(self, why: str) -> None:
        """Drop the engine until a request comes; that request waits for the next one."""
        self.become(ServerState.ASLEEP, why)

    def stop(self) -> None:
        """Refuse requests for good."""
        self.become(ServerState.DRAINING, "the server was told to stop")

    def become(self, state: ServerState, why: str = "", engine: Engine | None = None) -> None:
        """Change the state. Raises InternalError if it cannot follow the present one."""
        if state not in _NEXT[self._own.state]:
            raise InternalError(f"a server that was {self._own.state.value} became {state.value}")
        self._own, self.engine = ServerStatus(state, why), engine
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_wanted(self) -> None:
        """Wait while the server is asleep."""
        while self.state is ServerState.ASLEEP:
            await self._changed.wait()

    async def wake_engine(self) -> Engine:
        """Return the engine, once the model is loaded: an unloaded one is loaded again.

        Raises:
            HttpError: no request can be answered (503). QueueFull: too many requests wait already.
        """
        if self.state in _WAITED_FOR:
            if self.num_waking >= self._max_waking:
                waiting = counted(self.num_waking, "request waits", "requests wait")
                full = QueueFull(f"{waiting} for the model to be loaded; try again later")
                self.stats.refuse(full)
                raise full
            self.num_waking += 1
            try:
                while self.state in _WAITED_FOR:
                    if self.state is ServerState.ASLEEP:
                        self.become(ServerState.WAKING, "a request came: the model is loaded again")
                    await self._changed.wait()
            finally:
                self.num_waking -= 1
        return self.require_engine()

    def require_engine(self) -> Engine:
        """Return the engine. Raises HttpError (503) if there is none, or none that will answer again.

        An engine that is replacing a lost chain accepts requests, which wait for the next one.
        """
        if self.engine is None or self.engine.failure or self.engine.status.state is ServerState.DRAINING:
            raise HttpError(503, f"{self.state.word}: {self.why}", self.state.word)
        return self.engine

    def name_for(self, name: str | None) -> str:
        """Return the name that the answer to a request for this model carries."""
        if name is None or not self._answers_any_name:
            self.require_name(name)
        return self.names[0] if name is None else name

    def require_name(self, name: str | None) -> None:
        """Raise HttpError (404) for a model that is not served here."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise HttpError(404, f"expected a model that is served here ({known}), found {name!r}", "model_not_found")

    async def probe(self) -> None:
        """Send one token the way of a request: through the tokenizer's queue, then through all stages.

        A model that is asleep stays asleep. Raises HttpError (503) if the token is not back in time.
        """
        try:
            async with asyncio.timeout(DEEP_S), self.probing:
                if self.state is not ServerState.ASLEEP:
                    engine = self.require_engine()
                    await engine.inputs.token_texts([0])
                    await engine.probe()
        except TimeoutError:
            raise HttpError(503, f"no token went through all stages within {DEEP_S:g} s", "too_slow") from None
