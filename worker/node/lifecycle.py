"""The life of a worker: one record of its layers, their reservation and its place in a chain, with one state.

Loads run one at a time. A load ends early only if the coordinator gives it up or it fails; the tensors that it has read
by then are kept for the next load.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TypeVar

import mlx.core as mx

from protos.brigade_pb2 import AttachRequest, Coordinator, Grammar, LoadProgress, LoadRequest, Report, StatusReply
from worker.compute.header import check_grammar
from worker.compute.shard import Shard
from worker.drafters.kinds import DrafterPart
from worker.errors import FrameError, ModelError, NodeBusy, StageLost
from worker.model.checkpoint import Checkpoint, Stamp
from worker.model.contents import check_contents
from worker.node.attachment import Attachment, check_place
from worker.node.loading import QUIET_S, load_shard
from worker.node.log import log_failure
from worker.node.model_sources import ModelSources, check_load_request, check_model
from worker.node.network import Network
from worker.node.prefix_store import PrefixStore
from worker.node.stage import LeftStep, Stage, status_reply
from worker.node.weights_cache import Lease
from worker.platform.mlx_memory import forget_peak, give_back, keep_within
from worker.platform.tasks import background
from worker.platform.threads import MlxThread, run_in_thread

# The slowest worker of a chain may load for hours while this one waits, for example 400 GB over Wi-Fi. A coordinator
# that has not attached after this time has ended.
RESERVED_S = 6 * 3600.0
_LEFT_S = 5.0  # that the hop of a chain may take to close
WAITING_S = 1.0  # between two reports of a load that waits for another one

_ENDED = object()

T = TypeVar("T")
ReportProgress = Callable[[LoadProgress], Awaitable[None]]


class WorkerState(StrEnum):
    """The state of a worker."""

    EMPTY = "empty"  # no shard: none was loaded, or it was released, or its load failed or was given up
    LOADING = "loading"
    LOADED = "loaded"  # a shard outside of any chain
    ATTACHED = "attached"
    DRAINING = "draining"  # about to end; its chain continues until the sessions have ended


TRANSITIONS = {
    WorkerState.EMPTY: {WorkerState.LOADING, WorkerState.DRAINING},
    WorkerState.LOADING: {WorkerState.EMPTY, WorkerState.LOADED, WorkerState.DRAINING},
    WorkerState.LOADED: {WorkerState.EMPTY, WorkerState.LOADING, WorkerState.ATTACHED, WorkerState.DRAINING},
    WorkerState.ATTACHED: {WorkerState.LOADED, WorkerState.DRAINING},
    WorkerState.DRAINING: {WorkerState.DRAINING},
}


@dataclass(frozen=True)
class HeldModel:
    """A worker's tensors of a model: a shard, or those that a given-up load has read."""

    request: LoadRequest  # reduced by `_shard_of`
    stamp: Stamp
    shard: DrafterPart | None
    read: dict[str, mx.array]
    lease: Lease  # of its files

    @property
    def has_tensors(self) -> bool:
        return self.shard is not None or bool(self.read)

    def released(self) -> "HeldModel":
        """Return the record without tensors."""
        self.lease.close()
        return replace(self, shard=None, read={})


@dataclass(frozen=True)
class Reservation:
    """The claim of the coordinator that had a shard loaded and attaches it once its slowest worker has loaded."""

    coordinator_id: str
    until: float  # on the event loop's clock


class Worker:
    """The record of a worker. Use it on the event loop only."""

    def __init__(self, name: str, thread: MlxThread, sources: ModelSources, log: logging.Logger) -> None:
        self.name = name
        self.state = WorkerState.EMPTY
        self.attachment: Attachment | None = None  # while ATTACHED, and perhaps while DRAINING
        self._held: HeldModel | None = None
        self._drafter: HeldModel | None = None  # beside its layers, what drafts or reads them for a draft head
        self._reservation: Reservation | None = None
        self._used_at = 0.0  # the last time, on the event loop's clock
        self._changed = asyncio.Event()  # replaced at each change
        self._turn = asyncio.Lock()  # held to change the tensors, or to measure
        self._num_reported = 0  # by loads, of what they do themselves
        self._left: LeftStep | None = None  # of the last chain
        self._thread = thread
        self._sources = sources
        self._log = log

    @property
    def shard(self) -> Shard | None:
        held = self._held.shard if self._held else None
        assert held is None or isinstance(held, Shard)
        return held

    @property
    def _all_held(self) -> list[HeldModel]:
        return [held for held in (self._held, self._drafter) if held]

    @property
    def _weight_bytes(self) -> int:
        return sum(held.shard.nbytes for held in self._all_held if held.shard)

    @property
    def stage(self) -> Stage | None:
        return self.attachment.stage if self.attachment else None

    @property
    def is_free(self) -> bool:
        """Whether it is outside of any chain, does not load and is not about to end."""
        return self.state in (WorkerState.EMPTY, WorkerState.LOADED)

    @property
    def is_reserved(self) -> bool:
        """Whether a coordinator has loaded layers here and is about to attach them."""
        return self._reservation is not None and asyncio.get_running_loop().time() < self._reservation.until

    def status(self) -> StatusReply:
        """Return the status of the stage, or of the held tensors. Does not wait for the MLX thread."""
        if self.stage:
            return self.stage.status()
        return status_reply(busy_s=self._left.busy_s if self._left else 0.0, weight_bytes=self._weight_bytes)

    # Loading

    @contextlib.asynccontextmanager
    async def turn(self, report: ReportProgress | None = None) -> AsyncIterator[None]:
        """Wait for loads and measurements in progress, and keep others out until the context ends.

        Report that this one waits if there is a `report`, once a second while the load before it reports something.
        """
        wait_s, num_seen = 0.0 if report else None, -1
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    await self._turn.acquire()
                    break
            except TimeoutError:
                assert report is not None
                if num_seen != self._num_reported:
                    num_seen = self._num_reported
                    await report(LoadProgress(phase="waiting"))
                wait_s = WAITING_S
        try:
            yield
        finally:
            self._turn.release()

    async def find(self, request: LoadRequest) -> Checkpoint:
        """Return this node's copy of the model; its weights may be missing. Raises ModelError if there is none."""
        return await run_in_thread(partial(self._sources.open, request, partial(check_model, request)))

    async def load(self, request: LoadRequest, report: ReportProgress) -> None:
        """Load the requested shard and reserve it for its coordinator. Cancelling stops the load.

        Raises:
            ModelError: this node's copy is of another model, or damaged. NodeBusy: as `release_for`.
        """

        async def counted(progress: LoadProgress) -> None:
            self._num_reported += 1
            await report(progress)

        async with self.turn(report):
            await self.release_for(request.coordinator)
            self._become(WorkerState.LOADING)
            self._reservation = None  # of an earlier load
            try:
                await self._load(request, counted)
                reserved_until = asyncio.get_running_loop().time() + RESERVED_S
                self._reservation = Reservation(request.coordinator.id, reserved_until)
            finally:
                self._become(WorkerState.LOADED if self.shard else WorkerState.EMPTY)

    async def unload(self, coordinator: Coordinator) -> None:
        """Release the held tensors. Raises NodeBusy as `release_for`, or if another coordinator has reserved them."""
        async with self.turn():
            await self.release_for(coordinator)
            if self.is_reserved and self._reservation and self._reservation.coordinator_id not in ("", coordinator.id):
                raise NodeBusy("has loaded its layers for another coordinator, which is about to use them")
            await self.release_tensors(f"coordinator {coordinator.name} is idle")

    async def release_tensors(self, why: str) -> None:
        """Release the held tensors and their reservation: the next load reads them again."""
        self._reservation = None
        names = [_name_of(held.request) for held in self._all_held if held.has_tensors]
        if not names:
            return
        self._held = self._held and self._held.released()  # records what was released
        self._drafter = self._drafter and self._drafter.released()
        self._become(WorkerState.EMPTY)
        self._log.info("released %s: %s; the next load reads it again", " and ".join(names), why)
        await self._wait_left()
        await self._thread.run(give_back)

    def free_files(self) -> None:
        """Allow the eviction of received files that an idle, unreserved worker holds: its tensors are in memory."""
        if self.is_free and not self.is_reserved:
            for held in self._all_held:
                held.lease.close()

    @contextlib.asynccontextmanager
    async def keep_alive(self, keep_alive_s: float | None) -> AsyncIterator[None]:
        """Release tensors that were unused for so long, until the context ends; None keeps them."""
        if keep_alive_s is None:
            yield
            return
        async with background(self._release_unused(keep_alive_s), partial(log_failure, self._log)):
            yield

    async def digests(self) -> dict[str, str]:
        """Return a digest per tensor, computed in steps between frames. Raises ModelError if nothing is loaded."""
        found: dict[str, str] = {}
        pieces = self._require_shard().digest_into(found)
        try:
            while await self._thread.run(partial(next, pieces, _ENDED)) is not _ENDED:
                pass
        finally:
            self._used_at = asyncio.get_running_loop().time()
            await self._thread.run(pieces.close)  # its arrays belong to that thread
        return found

    async def compile(self, grammar: Grammar) -> None:
        """Compile a grammar. Raises ModelError if nothing is loaded, SamplingError for a malformed grammar."""
        shard = self._require_shard()
        check_grammar(grammar)
        await run_in_thread(partial(shard.grammars.guide, grammar))

    # Attaching

    @contextlib.asynccontextmanager
    async def attached(
        self, request: AttachRequest, write: Callable[[Report], Awaitable[None]], network: Network
    ) -> AsyncIterator[Attachment]:
        """Be part of a chain until the context ends, or until the coordinator replaces the attachment.

        Raises:
            NodeBusy: as `release_for`, or the worker is loading. FrameError: as `release_for`.
            ModelError: another shard is held. StageLost: none any more, or the worker is about to end.
            BrigadeError: the refusal of the next stage.
        """
        await self.release_for(request.coordinator, request.epoch)
        if self.state is WorkerState.LOADING:
            raise NodeBusy("is loading a shard; try again once it has")
        self._require_loaded(self._held, request.loaded)
        check_place(request)
        self.attachment = attachment = Attachment(request, write)
        self._become(WorkerState.ATTACHED)
        try:
            # no names for the shard and its drafter: an error that passes through here would keep them
            await attachment.open(
                self._require_shard(), self._drafter_of(request), self._thread, network, self.name, self._drop_drafter
            )
            self.refuse_if_draining()
            self._reservation = None
            yield attachment
        except asyncio.CancelledError:
            if not attachment.is_replaced:
                raise
            raise StageLost("was attached again by the same coordinator") from None
        finally:
            self._left = attachment.close() or self._left
            self.attachment = None
            self._become(WorkerState.LOADED)

    def place(self) -> tuple[Stage, AttachRequest]:
        """Return its place in the chain. Any thread may ask. Raises FrameError if it has none."""
        attachment = self.attachment
        if attachment is None or (stage := attachment.stage) is None:
            raise FrameError("is not part of a chain; the coordinator attaches it first")
        return stage, attachment.request

    def require_prefixes(self) -> PrefixStore:
        """Return where it keeps prefixes. Raises FrameError if it is not part of a chain that does."""
        if self.attachment is None or self.attachment.prefixes is None:
            raise FrameError("expected a node of a chain that keeps prefixes on disk")
        return self.attachment.prefixes

    async def release_for(self, coordinator: Coordinator, epoch: int | None = None) -> None:
        """End the attachment that this coordinator may still have here.

        Raises:
            StageLost: the node is about to end.
            NodeBusy: it serves another coordinator.
            FrameError: the epoch is earlier than that of the attachment.
        """
        self.refuse_if_draining()
        while attachment := self.attachment:
            holder = attachment.request
            if not coordinator.id or coordinator.id != holder.coordinator.id:
                raise NodeBusy("already serves another coordinator; stop that one, or start a worker on another port")
            if epoch is not None and epoch < holder.epoch:
                raise FrameError(f"expected epoch {holder.epoch} or a later one, got {epoch}")
            attachment.replace()
            while self.attachment is attachment:
                await self._changed.wait()
            self.refuse_if_draining()

    async def wait_detached(self) -> None:
        """Return once this node is not part of a chain."""
        while self.attachment:
            await self._changed.wait()

    # Ending

    def refuse_if_draining(self) -> None:
        """Raise StageLost while it drains: for a coordinator it is gone, and may come back."""
        if self.state is WorkerState.DRAINING:
            raise StageLost("is shutting down")

    async def drain(self) -> None:
        """Refuse new coordinators, ask the present one to open no session, and return once no slot is open."""
        self._become(WorkerState.DRAINING)
        if self.attachment:
            self.attachment.say_draining()
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Return once no slot is open."""
        if self.stage:
            await self._thread.call(self.stage.wait_idle())

    def _become(self, state: WorkerState) -> None:
        """Enter a state. A draining worker stays in that state."""
        state = WorkerState.DRAINING if self.state is WorkerState.DRAINING else state
        assert state is self.state or state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state
        self._used_at = asyncio.get_running_loop().time()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _release_unused(self, keep_alive_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left_s = None
            if self.is_free and any(held.has_tensors for held in self._all_held):
                reserved_until = self._reservation.until if self._reservation else 0.0
                left_s = max(self._used_at, reserved_until) + keep_alive_s - loop.time()
                if left_s <= 0:
                    await self.release_tensors(f"unused for {keep_alive_s:g} s")
                    continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    async def _wait_left(self) -> None:
        """Wait until the MLX thread holds nothing of the last chain, whose step may have been in progress."""
        if self._left:
            await self._thread.run(lambda: None)  # after that step
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEFT_S):
                    await self._left.is_released.wait()
            for _ in range(2):  # after the coroutine that was the last to hold it, and after its error has come here
                await self._thread.run(lambda: None)

    def _require_shard(self) -> Shard:
        if self.shard is None:
            raise ModelError("holds no shard; load first")
        return self.shard

    def _require_loaded(self, held: HeldModel | None, expected: LoadRequest) -> DrafterPart:
        """Return what is held if it is the expected shard.

        Raises:
            ModelError: it is another one. StageLost: its tensors were released meanwhile.
        """
        if held and held.shard is None:
            raise StageLost("has released its layers meanwhile; load them again")
        if held is None or held.shard is None or held.request != _shard_of(expected):
            found = f"[{held.request.start}, {held.request.end}) of {held.request.model}" if held else "none"
            raise ModelError(
                f"expected to hold layers [{expected.start}, {expected.end}) of {expected.model}, holds {found} by "
                "now; start again"
            )
        return held.shard

    async def _load(self, request: LoadRequest, report: ReportProgress) -> None:
        checkpoint, lease = await _checked(partial(self._open, request), report)
        held, wanted = self._drafter if request.is_drafter else self._held, _shard_of(request)
        if held:
            held.lease.close()
        if held and held.shard and (held.request, held.stamp) == (wanted, checkpoint.opened):
            self._hold(request, replace(held, lease=lease))
            self._log.info("kept %s", _name_of(request))
            await self._thread.run(partial(keep_within, request.memory_bytes, self._weight_bytes))
            await report(LoadProgress(phase="kept", done=held.shard.nbytes, total=held.shard.nbytes))
            return
        tensors: dict[str, mx.array] = {}  # that can be kept
        if held and _is_of_same_model(held, wanted, checkpoint.opened):
            tensors = held.shard.tensors if held.shard else held.read
        held = None  # the memory of the other tensors is needed
        self._hold(request, None)
        await self._wait_left()
        if not request.is_drafter:
            self._release_drafter()  # there may be no memory for both; else it is loaded again
        self._log.info("loading %s", _name_of(request))
        began = time.monotonic()
        try:
            shard = await self._read(checkpoint, request, tensors, report)
            if request.is_drafter and self.shard:
                nbytes = self.shard.nbytes + shard.nbytes
                await self._thread.run(partial(keep_within, request.memory_bytes, nbytes))
            tensors = shard.tensors
            await _checked(partial(check_contents, checkpoint, request.contents), report)  # files that came only now
        except asyncio.CancelledError:
            self._log.info("gave up loading %s: the coordinator cancelled it", _name_of(request))
            try:
                self._hold(request, HeldModel(wanted, checkpoint.require_unchanged(), None, tensors, lease))
            except ModelError:  # a file has changed: keep nothing
                lease.close()
            raise
        except BaseException:
            lease.close()
            raise
        self._hold(request, HeldModel(wanted, checkpoint.require_unchanged(), shard, {}, lease))
        await self._thread.run(forget_peak)
        took_s = time.monotonic() - began
        self._log.info("loaded %s: %.1f MiB in %.1f s", _name_of(request), shard.nbytes / 2**20, took_s)

    def _drafter_of(self, request: AttachRequest) -> DrafterPart | None:
        """Return what of the drafter this place has; free a held one if it has none.

        Raises:
            ModelError, StageLost: as `_require_loaded`.
        """
        if not request.HasField("drafter"):
            self._release_drafter()
            return None
        return self._require_loaded(self._drafter, request.drafter)

    def _release_drafter(self) -> None:
        if self._drafter:
            self._drafter = self._drafter.released()

    def _drop_drafter(self) -> None:
        """Free a drafter that has failed: its chain goes on without it, and the next load reads it again."""
        self._release_drafter()
        self._thread.post(mx.clear_cache)

    def _hold(self, request: LoadRequest, held: HeldModel | None) -> None:
        if request.is_drafter:
            self._drafter = held
        else:
            self._held = held

    async def _read(
        self, checkpoint: Checkpoint, request: LoadRequest, tensors: dict[str, mx.array], report: ReportProgress
    ) -> DrafterPart:
        """Return the shard. After a cancellation, wait until the loading threads have stopped.

        Args:
            tensors: of the same model, which the shard takes over; after a cancellation, those that were read.
        """
        given_up = threading.Event()
        progress: asyncio.Queue[LoadProgress | None] = asyncio.Queue()
        layers = request.start, request.end
        load = asyncio.create_task(
            load_shard(checkpoint, *layers, self._thread, progress.put_nowait, given_up, tensors, request.memory_bytes)
        )
        load.add_done_callback(lambda _: progress.put_nowait(None))
        try:
            while (each := await progress.get()) is not None:
                await report(each)
            return await load
        finally:
            given_up.set()
            await asyncio.gather(load, return_exceptions=True)

    def _open(self, request: LoadRequest, note_read: Callable[[], None]) -> tuple[Checkpoint, Lease]:
        """Return this node's copy of the requested model, and a lease of its files."""
        checkpoint = self._sources.open(request, lambda found: check_load_request(request, found, note_read))
        return checkpoint, self._sources.lease(checkpoint, request.start, request.end)


async def _checked(check: Callable[[Callable[[], None]], T], report: ReportProgress) -> T:
    """Return the result of a check of files, which runs on a thread.

    Report now and then that it gets on, so that the coordinator does not take a slow disk for a stall.
    """
    num_read = num_reported = 0

    def note_read() -> None:
        nonlocal num_read
        num_read += 1

    checking = asyncio.create_task(run_in_thread(partial(check, note_read)))
    try:
        while not (await asyncio.wait([checking], timeout=QUIET_S))[0]:
            if num_read > num_reported:
                num_reported = num_read
                await report(LoadProgress(phase="check"))
        return checking.result()
    finally:
        checking.cancel()


def _name_of(request: LoadRequest) -> str:
    what = "the drafter" if request.is_drafter else f"layers [{request.start}, {request.end}) of"
    return f"{what} {request.model}"


def _is_of_same_model(held: HeldModel, wanted: LoadRequest, stamp: Stamp) -> bool:
    """Return whether the held tensors are of the same copy of the model and its files are unchanged."""
    other = LoadRequest()
    other.CopyFrom(wanted)
    other.start, other.end, other.embeds_last = held.request.start, held.request.end, held.request.embeds_last
    return other == held.request and set(held.stamp) <= set(stamp)


def _shard_of(request: LoadRequest) -> LoadRequest:
    """Return the request without the fields that do not affect the shard."""
    shard = LoadRequest()
    shard.CopyFrom(request)
    for field in ("coordinator", "contents", "memory_bytes", "digests"):
        shard.ClearField(field)
    return shard
