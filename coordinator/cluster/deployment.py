"""Deployments: which shard of a model each node holds, and loading it there. Loaded shards outlive chains."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version

from coordinator.cluster.peer import COORDINATOR_ID, Peer
from coordinator.cluster.progress import NodeProgress
from coordinator.cluster.weights import known_digests, load_pushing
from coordinator.planning.plan import Plan
from protos.brigade_pb2 import Contents, Coordinator, DType, LoadProgress, LoadRequest
from worker.compute.shard import Shard
from worker.compute.slot import Slot
from worker.compute.slots import close_slots
from worker.drafters.kinds import DrafterPart
from worker.model.checkpoint import Checkpoint
from worker.model.contents import contents_of
from worker.model.describe import describe
from worker.model.model_spec import ModelSpec
from worker.node.loading import load_shard
from worker.node.network import PROTOCOL_VERSION
from worker.node.prefix_store import naming_secret
from worker.platform.mlx_memory import forget_peak, keep_within
from worker.platform.threads import MlxThread, run_in_thread


@dataclass(frozen=True)
class Deployment:
    """A model, its plan, and the workers that hold all but the first shard, in the plan's order."""

    checkpoint: Checkpoint
    plan: Plan
    peers: Sequence[Peer]
    check_finite: bool = False  # have every stage check its output for NaN and infinities
    feeds: bool = True  # send the workers the weights that they lack
    prefix_bytes: int = 0  # that prefixes may take on each node's disk; 0: none are kept there
    naming_secret: bytes = b""  # by which pieces of prefixes are named; empty: that of this user

    @cached_property
    def spec(self) -> ModelSpec:
        """The model, without its drafter if the plan leaves that out."""
        spec = describe(self.checkpoint)
        return spec if self.plan.has_drafter else replace(spec, drafter=None)

    @property
    def drafter(self) -> Checkpoint | None:
        """What drafts where tokens are sampled: a small model or a draft head."""
        return self.checkpoint.drafter if self.spec.drafter else None

    @property
    def coordinator(self) -> Coordinator:
        """This process, as workers know it."""
        return Coordinator(id=COORDINATOR_ID, name=self.plan.assignments[0].name)

    def load_request(
        self, stage: int, contents: Contents | None = None, digests: Mapping[int, str] | None = None
    ) -> LoadRequest:
        """Return the request to the worker of this stage, from 1.

        `contents` and `digests` describe our own copy of the model.
        """
        assignment, spec = self.plan.assignments[stage], self.plan.spec_on(stage, self.spec)
        return LoadRequest(
            model=self.checkpoint.name,
            fingerprint=self.checkpoint.fingerprint,
            start=assignment.start,
            end=assignment.end,
            num_layers=self.spec.num_layers,
            dtype=self.spec.dtype,
            contents=contents,
            coordinator=self.coordinator,
            memory_bytes=assignment.memory_bytes,
            embeds_last=spec.serves_head and assignment.end == self.spec.num_layers,
            digests={
                place: digest
                for place, digest in (digests or {}).items()  # a negative place is beside the layers, on the last stage
                if assignment.start <= place < assignment.end or (place < 0 and assignment.end == self.spec.num_layers)
            },
        )

    def drafter_request(
        self, stage: int, contents: Contents | None = None, digests: Mapping[int, str] | None = None
    ) -> LoadRequest | None:
        """Return the request for what this stage's worker needs of the drafter; None if that is nothing."""
        assignment, drafter, spec = self.plan.assignments[stage], self.drafter, self.plan.spec_on(stage, self.spec)
        if not (drafter and self.spec.drafter and spec.has_drafting(assignment.start, assignment.end)):
            return None
        return LoadRequest(
            model=drafter.name,
            fingerprint=drafter.fingerprint,
            end=self.spec.drafter.num_layers if spec.drafts and assignment.end == spec.num_layers else 0,
            num_layers=self.spec.drafter.num_layers,
            dtype=self.spec.drafter.dtype,
            contents=contents,
            coordinator=self.coordinator,
            memory_bytes=assignment.memory_bytes,
            digests=digests or {},
            is_drafter=True,
        )


@dataclass(frozen=True)
class OwnCopy:
    """The description of the coordinator's own copy of the model, with which workers compare theirs."""

    contents: Contents
    digests: Mapping[int, str]

    @classmethod
    async def of(cls, checkpoint: Checkpoint) -> "OwnCopy":
        """Describe this copy. Raises ModelError if a weight file cannot be read, or was changed since it was opened."""
        await run_in_thread(checkpoint.require_unchanged)
        contents = await run_in_thread(partial(contents_of, checkpoint))
        return cls(contents, await run_in_thread(partial(known_digests, checkpoint)))


async def load_worker(deployment: Deployment, stage: int, known: OwnCopy, progress: NodeProgress) -> None:
    """Have the worker of this stage, from 1, load its shard, after sending it the weights that it lacks.

    Raises:
        BrigadeError: the worker's refusal. StageLost: it is lost, or its load stalls.
    """
    peer = deployment.peers[stage - 1]
    request = deployment.load_request(stage, known.contents, known.digests)
    report = partial(progress, peer.name)
    await load_pushing(peer, request, deployment.checkpoint, report, feeds=deployment.feeds)
    if (drafter := deployment.drafter) and deployment.drafter_request(stage):
        own = await OwnCopy.of(drafter)
        asked = deployment.drafter_request(stage, own.contents, own.digests)
        assert asked is not None
        await load_pushing(peer, asked, drafter, report, feeds=deployment.feeds)


def naming_key(secret: bytes, checkpoint: Checkpoint, dtype: DType) -> bytes:
    """Return a key for names of prefixes: a secret, joined with the identity of the weights and of what computes.

    Raises:
        ModelError: a weight file cannot be read.
    """
    contents = contents_of(checkpoint)
    marks = b"" if contents.hub_hashes else contents.marks  # of a hub's files some may not be here yet
    model = Contents(marks=marks, hub_hashes=contents.hub_hashes).SerializeToString(deterministic=True)
    model += checkpoint.fingerprint.SerializeToString(deterministic=True)
    parts = f"{PROTOCOL_VERSION} {version('mlx-lm')} {dtype} ".encode() + model
    return hashlib.blake2b(parts, key=secret, digest_size=32).digest()


class OwnNode:
    """This process as the node of stage 0: its MLX thread and its shard. An async context manager."""

    def __init__(self, thread: MlxThread | None = None, *, keeps_to_plan: bool = False) -> None:
        """Use the MLX `thread` of this process, or make one and close it with this node.

        A node that `keeps_to_plan` limits MLX to the memory of its plan; not for a process with other models.
        """
        self.thread = thread or MlxThread()
        self.shard: Shard | None = None
        self.part: DrafterPart | None = None  # what this stage needs of a drafter
        self.slots: dict[int, Slot] = {}  # by number, of its last executor, which the next one of this shard continues
        self._part_source: tuple[Checkpoint, int] | None = None
        self._source: Checkpoint | None = None  # of the shard; fine-tunes of one model may differ in their weights only
        self._naming_key: tuple[Checkpoint, bytes] | None = None
        self._closes_thread = thread is None
        self._keeps_to_plan = keeps_to_plan

    async def __aenter__(self) -> "OwnNode":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.thread.post(partial(close_slots, self.slots))
        if self._closes_thread:
            self.thread.close()

    async def load(self, deployment: Deployment, progress: NodeProgress = lambda node, report: None) -> None:
        """Load this process's shard, unless it is loaded already; reuse the layers that are.

        Raises:
            BrigadeError: the layers cannot be read.
        """
        request = deployment.drafter_request(0)
        source = (deployment.drafter, request.end) if request and deployment.drafter else None
        if source != self._part_source:
            self.part = self._part_source = None  # frees its memory
        await self._load_layers(deployment, progress)
        if source and self.part is None:
            await self._load_part(*source, deployment, progress)

    async def naming_key(self, deployment: Deployment) -> bytes:
        """Return the key for names of prefixes on disk.

        Raises:
            ModelError: a weight file cannot be read. ConfigError: the secret cannot be read or written.
        """
        checkpoint = deployment.checkpoint
        if self._naming_key is None or self._naming_key[0] is not checkpoint:
            secret = deployment.naming_secret or await run_in_thread(naming_secret)
            key = await run_in_thread(partial(naming_key, secret, checkpoint, deployment.spec.dtype))
            self._naming_key = checkpoint, key
        return self._naming_key[1]

    def drop_part(self) -> None:
        """Free what this stage has of a drafter that has failed; the next load reads it again."""
        self.part = self._part_source = None

    async def _load_layers(self, deployment: Deployment, progress: NodeProgress) -> None:
        own, held = deployment.plan.assignments[0], self.shard
        if held and self._source is deployment.checkpoint and (held.start, held.end) == (own.start, own.end):
            progress(own.name, LoadProgress(phase="kept", done=held.nbytes, total=held.nbytes))
            return
        await run_in_thread(deployment.checkpoint.require_unchanged)
        await self.thread.run(partial(close_slots, self.slots))
        tensors = held.tensors if held and self._source is deployment.checkpoint else {}
        self.shard = held = None  # frees its memory
        found = await load_shard(
            deployment.checkpoint,
            own.start,
            own.end,
            self.thread,
            partial(progress, own.name),
            held=tensors,
            memory_bytes=own.memory_bytes if self._keeps_to_plan else 0,
        )
        await run_in_thread(deployment.checkpoint.require_unchanged)
        assert isinstance(found, Shard)
        self.shard = found
        await self.thread.run(forget_peak)
        self._source = deployment.checkpoint

    async def _load_part(self, source: Checkpoint, end: int, deployment: Deployment, progress: NodeProgress) -> None:
        """Load what this stage needs of the drafter beside its layers."""
        own = deployment.plan.assignments[0]
        assert self.shard is not None
        part = await load_shard(source, 0, end, self.thread, partial(progress, own.name))
        await run_in_thread(source.require_unchanged)
        self.part = part
        self._part_source = source, end
        memory_bytes = own.memory_bytes if self._keeps_to_plan else 0
        await self.thread.run(partial(keep_within, memory_bytes, self.shard.nbytes + self.part.nbytes))
