"""The one record of a server: its state and its model, and what holds for every request."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.api.errors import refuse, unavailable
from coordinator.cluster.progress import say
from coordinator.engine.engine import Engine, ServerState
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.stats import Stats
from coordinator.engine.status import ClusterStatus
from worker.errors import InternalError, QueueFull

_DEEP_S = 5.0  # within which a token has to pass all stages
# The states of a server that has no open model, or READY if it has one, and those that may follow. While a model is
# open, its own state holds instead: ready, degraded, recovering, draining or failed.
_NEXT: Mapping[ServerState, frozenset[ServerState]] = {
    ServerState.LOADING: frozenset({ServerState.READY, ServerState.DRAINING}),
    ServerState.READY: frozenset({ServerState.ASLEEP, ServerState.RECOVERING, ServerState.DRAINING}),
    ServerState.ASLEEP: frozenset({ServerState.WAKING, ServerState.DRAINING}),
    ServerState.WAKING: frozenset({ServerState.READY, ServerState.RECOVERING, ServerState.DRAINING}),
    ServerState.RECOVERING: frozenset({ServerState.READY, ServerState.RECOVERING, ServerState.DRAINING}),
    ServerState.DRAINING: frozenset({ServerState.DRAINING}),
}


@dataclass(frozen=True)
class RequestLimits:
    """What a request may cost, and how long it may take."""

    body_bytes: int = 8 << 20
    max_tokens: int = 4096  # of an answer whose request names no number
    queue_timeout_s: float = 60.0  # that it may wait for memory
    heartbeat_s: float = 10.0  # after which a silent stream sends a comment


class Server:
    """The one record of a server: its state, its model while one is open, and what holds for all requests."""

    def __init__(
        self,
        inputs: InputProcessor,
        names: Sequence[str],
        limits: RequestLimits | None = None,
        *,
        stats: Stats | None = None,
        max_waking: int = 256,
    ) -> None:
        """Begin as LOADING.

        Args:
            names: of the model; answers carry the first.
            max_waking: requests that may wait while an unloaded model is loaded again.
        """
        self.inputs = inputs
        self.names = names
        self.started = int(time.time())
        self.limits = limits or RequestLimits()
        self.stats = stats or Stats()
        self.status = ClusterStatus(self.stats)
        self._state, self._why = ServerState.LOADING, "the model is being loaded"
        self._model: Engine | None = None
        self._changed = asyncio.Event()  # of the present state: set when it ends
        self._max_waking = max_waking
        self._num_waking = 0
        self._probing = asyncio.Lock()  # one deep health check at a time

    @property
    def model(self) -> Engine | None:
        """The open model."""
        return self._model

    @property
    def state(self) -> ServerState:
        return self._model.status.state if self._model else self._state

    @property
    def why(self) -> str:
        """Why it is not READY."""
        return self._model.status.why if self._model else self._why

    @property
    def takes_requests(self) -> bool:
        return self.state in (ServerState.READY, ServerState.DEGRADED, ServerState.ASLEEP)

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self._model.context if self._model else self.inputs.spec.context

    def open(self, model: Engine) -> None:
        """Answer by this model from now on."""
        self._become(ServerState.READY, model=model)

    def fail(self, why: str) -> None:
        """Refuse requests: there is no model until another attempt to open one succeeds."""
        self._become(ServerState.RECOVERING, why)

    def sleep(self, why: str) -> None:
        """Let the model go until a request comes, which will wait for it."""
        self._become(ServerState.ASLEEP, why)
        self.status.forget()

    def stop(self) -> None:
        """Refuse requests for good."""
        self._become(ServerState.DRAINING, "the server was told to stop")

    def _become(self, state: ServerState, why: str = "", model: Engine | None = None) -> None:
        if state not in _NEXT[self._state]:
            raise InternalError(f"a server that was {self._state.value} became {state.value}")
        self._state, self._why, self._model = state, why, model
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_wanted(self) -> None:
        """Wait while the server is asleep."""
        while self.state is ServerState.ASLEEP:
            await self._changed.wait()

    async def wake_model(self) -> Engine:
        """Return the model, after loading it again if it is asleep.

        Raises:
            Refusal: nothing can be answered. QueueFull: too many requests wait already.
        """
        if self._is_asleep:
            if self._num_waking >= max(1, self._max_waking):
                raise QueueFull(f"{self._num_waking} requests wait for the model to be read again; try again later")
            self._num_waking += 1
            try:
                while self._is_asleep:
                    if self.state is ServerState.ASLEEP:
                        self._become(ServerState.WAKING, "somebody asks: the model is read again")
                    await self._changed.wait()
            finally:
                self._num_waking -= 1
        return self.require_model()

    @property
    def _is_asleep(self) -> bool:
        return self.state in (ServerState.ASLEEP, ServerState.WAKING)

    def require_model(self) -> Engine:
        """Return the model. Raises Refusal (503) while nothing can be answered."""
        if self._model is None or not self.takes_requests:
            raise unavailable(f"{self.state.word}: {self.why}", self.state.word)
        return self._model

    def require_name(self, name: str | None) -> None:
        """Raise Refusal (404) for a model that is not served here."""
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise refuse(404, f"expected a model that is served here ({known}), found {name!r}", "model_not_found")

    async def probe(self) -> None:
        """Send one token through all stages, as a request would go: through the tokenizer's queue, then the chain.

        A model that is asleep stays asleep. Raises Refusal (503) if the token is not back in time.
        """
        try:
            async with asyncio.timeout(_DEEP_S), self._probing:
                if self.state is not ServerState.ASLEEP:
                    model = self.require_model()
                    await model.inputs.token_texts([0])
                    await model.look()
        except TimeoutError:
            raise unavailable(f"no token went through all stages within {_DEEP_S:g} s", "too_slow") from None

    async def sleep_when_unused(self, model: Engine, keep_alive_s: float | None) -> None:
        """Fall asleep once no request came for so long; None: never. Raises the model's failure."""
        while True:
            failing = asyncio.create_task(model.wait_failed())
            unused = asyncio.create_task(model.use.wait_unused(keep_alive_s))
            try:
                await asyncio.wait([failing, unused], return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    failing.result()
            finally:
                failing.cancel()
                unused.cancel()
                await asyncio.gather(failing, unused, return_exceptions=True)
            async with self._probing:
                if not model.use.is_used:  # a request may have come during a probe
                    self.sleep(f"nobody asked for {keep_alive_s:g} s; the next request has it read again")
                    say(f"asleep: {self.why}")
                    return
