"""Loader: the one shard that a node holds. One load at a time, and none that nobody waits for."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from protos.brigade_pb2 import Grammar, LoadProgress, LoadRequest, StatusReply
from worker.compute.header import check_grammar, dtype_name
from worker.compute.shard import Shard
from worker.errors import ModelError, StageLost
from worker.model.checkpoint import Checkpoint
from worker.model.contents import check_contents, check_files
from worker.model.describe import describe
from worker.node.copies import Copies
from worker.node.loading import load_shard
from worker.node.log import Log
from worker.process.call_thread import run_aside
from worker.process.mlx_memory import forget_peak, give_back, keep_within, memory_held
from worker.process.mlx_thread import MlxThread
from worker.store.locks import Lease

_WAITING_S = 1.0  # between two signs of life of a load that waits for another one

_ENDED = object()

Stamp = tuple[tuple[str, int], ...]
Report = Callable[[LoadProgress], Awaitable[None]]


@dataclass(frozen=True)
class Loaded:
    """The shard this node holds, and what it answers."""

    request: LoadRequest  # whoever asked
    stamp: Stamp
    shard: Shard


class Loader:
    """Where a node's shard comes from."""

    def __init__(self, thread: MlxThread, copies: Copies, log: Log) -> None:
        self.loaded: Loaded | None = None
        self._thread = thread
        self._copies = copies
        self._lease = Lease()  # of the files of what is loaded
        self._log = log
        self._turn = asyncio.Lock()
        self._is_let_go = False  # what was loaded last

    @property
    def is_busy(self) -> bool:
        return self._turn.locked()

    def status(self) -> StatusReply:
        """What a node that is part of no chain holds now."""
        memory = memory_held()
        return StatusReply(
            clock=time.monotonic_ns(),
            weight_bytes=self.loaded.shard.nbytes if self.loaded else 0,
            peak_memory_bytes=memory.peak,
            active_memory_bytes=memory.active,
            cached_memory_bytes=memory.cached,
        )

    @contextlib.asynccontextmanager
    async def turn(self, report: Report) -> AsyncIterator[None]:
        """Wait for whatever loads now to end, and say so meanwhile; until the end of the context nobody else loads."""
        wait_s = 0.0
        while not await self._take_turn(wait_s):
            await report(LoadProgress(phase="waiting"))
            wait_s = _WAITING_S
        try:
            yield
        finally:
            self._turn.release()

    async def find(self, request: LoadRequest) -> Checkpoint:
        """This node's copy of the model that is meant; its weights need not be here. Raises ModelError without one."""
        return await run_aside(partial(self._copies.open, request, partial(check_model, request)))

    async def load(self, request: LoadRequest, report: Report) -> None:
        """Hold the shard that is asked for, in a turn of one's own. Cancelling it stops the load.

        Raises:
            ModelError: this node has another model, or a damaged one.
        """
        checkpoint, stamp, lease = await run_aside(partial(self._open, request))
        self._lease.close()
        self._lease = lease
        held, wanted = self.loaded, _shard_of(request)
        if held and (held.request, held.stamp) == (wanted, stamp):
            self._log.kept(request)
            await self._thread.run(partial(keep_within, request.memory_bytes, held.shard.nbytes))
            await report(LoadProgress(phase="kept", done=held.shard.nbytes, total=held.shard.nbytes))
            return
        tensors = held.shard.tensors if held and _is_of_same_model(held, wanted, stamp) else {}
        self.loaded = held = None  # its memory is needed
        self._is_let_go = False
        with self._log.loading(request):
            began = time.monotonic()
            shard = await self._load(checkpoint, request, tensors, report)
            await run_aside(partial(check_contents, checkpoint, request.contents))  # files that have only now arrived
            self.loaded = Loaded(wanted, _stamp_after(checkpoint, stamp), shard)
            await self._thread.run(forget_peak)
            self._log.loaded(request, shard.nbytes, time.monotonic() - began)

    async def let_go(self, why: str) -> None:
        """Hold nothing any more: whoever wants it has it loaded again."""
        if (loaded := self.loaded) is None:
            return
        self.loaded, self._is_let_go = None, True
        self._lease.close()
        self._log.let_go(loaded.request, why)
        del loaded
        await self._thread.run(give_back)

    def free_files(self) -> None:
        """Let the files of what is loaded be removed if there is no room for others: it is in memory, and idle."""
        self._lease.close()

    def loaded_as(self, expected: LoadRequest) -> Loaded:
        """The loaded shard, if it is the one that the coordinator means.

        Raises:
            ModelError: it is another one. StageLost: it was let go, and is to be loaded again.
        """
        loaded = self.loaded
        if loaded is None and self._is_let_go:
            raise StageLost("has let its layers go meanwhile; they are to be loaded again")
        if loaded is None or loaded.request != _shard_of(expected):
            held = f"[{loaded.request.start}, {loaded.request.end}) of {loaded.request.model}" if loaded else "none"
            raise ModelError(
                f"expected to hold layers [{expected.start}, {expected.end}) of {expected.model}, holds {held} by now; "
                "start again"
            )
        return loaded

    async def digests(self) -> dict[str, str]:
        """A digest per tensor, a piece at a time: frames go between. Raises ModelError if nothing is loaded."""
        if (loaded := self.loaded) is None:
            raise ModelError("holds no shard; load first")
        found: dict[str, str] = {}
        pieces = loaded.shard.digest_into(found)
        del loaded
        try:
            while await self._thread.run(partial(next, pieces, _ENDED)) is not _ENDED:
                pass
        finally:
            await self._thread.run(pieces.close)  # where its arrays belong
        return found

    async def compile(self, grammar: Grammar) -> None:
        """Get ready for a grammar. Raises ModelError if nothing is loaded, SamplingError for a grammar that is none."""
        if (loaded := self.loaded) is None:
            raise ModelError("holds no shard; load first")
        check_grammar(grammar)
        await run_aside(partial(loaded.shard.grammars.guide, grammar))

    async def _take_turn(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    async def _load(
        self, checkpoint: Checkpoint, request: LoadRequest, held: dict[str, mx.array], report: Report
    ) -> Shard:
        """The shard; if nobody waits for it any more, return once what loads it has noticed."""
        given_up = threading.Event()
        progress: asyncio.Queue[LoadProgress | None] = asyncio.Queue()
        layers = request.start, request.end
        load = asyncio.create_task(
            load_shard(checkpoint, *layers, self._thread, progress.put_nowait, given_up, held, request.memory_bytes)
        )
        load.add_done_callback(lambda _: progress.put_nowait(None))
        try:
            while (each := await progress.get()) is not None:
                await report(each)
            return await load
        finally:
            given_up.set()
            await asyncio.gather(load, return_exceptions=True)

    def _open(self, request: LoadRequest) -> tuple[Checkpoint, Stamp, Lease]:
        """This node's copy of the model, if it is the one that the coordinator means; its stamp; its files, held."""
        checkpoint = self._copies.open(request, partial(check_request, request))
        lease = self._copies.lease(checkpoint, request.start, request.end)
        return checkpoint, checkpoint.stamp(), lease


def check_request(request: LoadRequest, checkpoint: Checkpoint) -> None:
    """Refuse before anything is read: another model, or layers that it does not have.

    Raises:
        ModelError: naming both values.
    """
    check_model(request, checkpoint)
    check_contents(checkpoint, request.contents)
    check_layers(request, checkpoint)
    check_files(checkpoint, request.start, request.end)


def check_layers(request: LoadRequest, checkpoint: Checkpoint) -> None:
    """Refuse layers, or hidden states, that the model does not have. Raises ModelError likewise."""
    spec = describe(checkpoint)
    layers = f"[{request.start}, {request.end}) of {request.num_layers} layers"
    if request.num_layers != spec.num_layers or not 0 < request.start < request.end <= spec.num_layers:
        raise ModelError(f"cannot hold {layers}: its copy of {checkpoint.name} has {spec.num_layers}")
    if request.dtype != spec.dtype:
        expected, found = dtype_name(request.dtype), dtype_name(spec.dtype)
        raise ModelError(f"expected hidden states of {expected}, its copy of {checkpoint.name} makes {found}")


def check_model(request: LoadRequest, checkpoint: Checkpoint) -> None:
    """Refuse another model, by its configuration and the shapes of its tensors. Raises ModelError likewise."""
    ours, theirs = checkpoint.fingerprint, request.fingerprint
    for part, what in (("config", "config.json"), ("tokenizer", "tokenizer files"), ("tensors", "tensor headers")):
        here, there = getattr(ours, part), getattr(theirs, part)
        if here != there:
            raise ModelError(
                f"its {what} of {checkpoint.name} (sha256 {here[:12]}) differ from the coordinator's ({there[:12]}); "
                "copy the same model to both nodes"
            )


def _stamp_after(checkpoint: Checkpoint, before: Stamp) -> Stamp:
    """The stamp once all is read. Raises ModelError if a file that was here before has changed since."""
    after = checkpoint.stamp()
    if changed := sorted(set(before) - set(after)):
        raise ModelError(f"{checkpoint.folder / changed[0][0]} changed while it was read; start again")
    return after


def _is_of_same_model(held: Loaded, wanted: LoadRequest, stamp: Stamp) -> bool:
    """Whether layers of what is held can be kept: other layers of the same copy, whose files have not changed since."""
    other = LoadRequest()
    other.CopyFrom(wanted)
    other.start, other.end = held.request.start, held.request.end
    return other == held.request and set(held.stamp) <= set(stamp)


def _shard_of(request: LoadRequest) -> LoadRequest:
    """What is to be loaded, whoever asks and whatever is known of it there."""
    shard = LoadRequest()
    shard.CopyFrom(request)
    shard.ClearField("coordinator")
    shard.ClearField("contents")
    shard.ClearField("memory_bytes")
    shard.ClearField("digests")
    return shard
