"""Model sources: where a worker finds the model that a coordinator requests.

The requested name is compared with the names of what is here; it is never opened as a path.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from protos.brigade_pb2 import LoadRequest
from worker.compute.header import dtype_name
from worker.config import NO_DRAFTER, ClusterConfig
from worker.errors import ModelError, ModelLacking
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.contents import check_contents, check_files
from worker.model.describe import describe, describe_model, shard_tensors
from worker.model.draft_heads import own_head
from worker.model.headers import TensorInfo, reading, unpack_headers
from worker.model.repository import is_on_hub, is_repository
from worker.node.loading import open_checkpoint
from worker.node.weights_cache import Lease, WeightsCache, as_requested

Headers = Mapping[str, TensorInfo]
Opening = Callable[[], Checkpoint]
Check = Callable[[Checkpoint], None]

_SHOWN = 100  # characters of a peer's name for a model


@dataclass(frozen=True)
class ModelSources:
    """The models that coordinators may load here, besides `demo` and those in the hub's cache.

    All methods block: call them from threads.
    """

    own: str | None = None  # a folder, a hub repository or `demo`, under any name that coordinators use
    roots: tuple[Path, ...] = ()  # folders whose subfolders are models
    may_download: bool = False  # any repository
    may_download_own: bool = True
    cache: WeightsCache | None = None  # of weights that coordinators send; None refuses them
    own_drafter: str | None = None  # as `own`, a small model that drafts

    @classmethod
    def of(
        cls, cluster: ClusterConfig, name: str | None, model: str | None, draft_model: str | None = None
    ) -> "ModelSources":
        """Return the sources that this node's configuration describes; the flags for models override it.

        A node may always download a model that is configured for it alone. With `pull: coordinator` only the
        coordinator downloads the model of all nodes, and sends it.
        """
        entry = next((worker for worker in cluster.workers if worker.name == name), None)
        for_this_node = model or (entry.model if entry else None)
        is_sent = cluster.pull == "coordinator"
        drafter = draft_model or cluster.draft_model
        return cls(
            own=for_this_node or cluster.model,
            own_drafter=None if drafter == NO_DRAFTER else drafter,
            roots=tuple(map(Path, cluster.models)),
            may_download=cluster.pull == "hub",
            may_download_own=bool(for_this_node) or not is_sent,
            cache=WeightsCache(limit=cluster.pull_limit) if is_sent else None,
        )

    def open(self, request: LoadRequest, check: Check) -> Checkpoint:
        """Return the first copy of the requested model that passes the check: one of its own, or a received one.

        Raises:
            ModelLacking: there is none, and the coordinator may send it.
            ModelError: there is none.
        """
        known = unpack_headers(request.contents.headers)

        def prepare(found: Checkpoint) -> Checkpoint:
            if request.is_drafter and found.fingerprint.tensors != request.fingerprint.tensors:
                found = own_head(found) or found
            return as_requested(found, request)

        own = replace(self, own=self.own_drafter) if request.is_drafter and self.own_drafter else self
        try:
            return own.open_own(request.model, known, check, prepare)
        except ModelError as error:
            if self.cache is None:
                raise
            try:
                received = self.cache.open(request.model, request.fingerprint, known, request.digests)
                received = prepare(received)
                check(received)
            except (ModelError, PermissionError):  # the latter of files that another user received
                raise ModelLacking(error.message) from error
            return received

    def lease(self, checkpoint: Checkpoint, start: int, end: int) -> Lease:
        """Protect the received files of these layers from eviction until the lease is closed.

        Raises:
            ModelLacking: one was evicted just now.
        """
        if self.cache is None:
            return Lease()
        try:
            return self.cache.lease(checkpoint, shard_tensors(checkpoint, start, end))
        except ModelError as error:
            raise ModelLacking(error.message) from error

    def open_own(
        self,
        wanted: str,
        known: Headers,
        check: Check,
        prepare: Callable[[Checkpoint], Checkpoint] = lambda found: found,
    ) -> Checkpoint:
        """Return the first of this node's own models that may be the wanted one and passes the check.

        Args:
            wanted: the coordinator's name for the model.
            known: the headers of the coordinator's copy: with them a folder may lack files.
            prepare: returns what is meant of a model that was found.
        Raises:
            ModelError: there is no candidate, or a folder of models cannot be read, or the refusal of the first one.
        """
        refusals = []
        for opening in self.candidates(wanted, known):
            try:
                checkpoint = prepare(opening())
                check(checkpoint)
                return checkpoint
            except ModelError as error:
                refusals.append(error)
        for root in self.roots:
            with reading(root), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.listdir(root)
        if refusals:
            raise refusals[0]
        # the same whether or not the name leads to anything
        shown = repr(wanted if len(wanted) <= _SHOWN else f"{wanted[:_SHOWN]}...")
        has = "no folder of that name directly below its `models:`" if self.roots else "no model of its own"
        raise ModelError(
            f"is asked for the model {shown}, opens no path that a peer names, and has {has}; "
            "start it with --model FOLDER_OR_REPO, or set `model:`, `models:` or `pull: coordinator` in its own "
            "cluster.yaml"
        )

    def candidates(self, wanted: str, known: Headers) -> list[Opening]:
        """Return functions that open what may be meant, the likeliest first. They are lazy: some ask the hub."""
        found: list[Opening] = [partial(open_checkpoint, wanted)] if wanted == "demo" else []
        name = PurePosixPath(_repository(wanted) if is_repository(wanted) else wanted).name
        for root in self.roots:
            found += [partial(open_folder, folder, known=known) for folder in _directly_below(root, name)]
        is_own = self._is_own_repository(wanted)
        if is_repository(wanted) and not is_own:
            from worker.model.hub import open_cached, open_repository  # with huggingface_hub, which folders never need

            found.append(partial(open_repository, wanted) if self.may_download else partial(open_cached, wanted, known))
        own = [partial(self._open_own, wanted, known)] if self.own else []
        is_far = is_on_hub(self.own or "") and not is_own
        return [*found, *own] if is_far else [*own, *found]

    def _open_own(self, wanted: str, known: Headers) -> Checkpoint:
        assert self.own is not None
        if is_on_hub(self.own) and not self.may_download_own:
            from worker.model.hub import open_cached

            return open_cached(wanted if self._is_own_repository(wanted) else self.own, known)
        if self._is_own_repository(wanted) and "@" not in self.own:
            from worker.model.hub import open_repository  # and with it huggingface_hub, which folders never need

            return open_repository(wanted)  # at the commit that the coordinator has
        return open_checkpoint(self.own, known)

    def _is_own_repository(self, wanted: str) -> bool:
        """Return whether the own model is of the same repository, at any revision."""
        own = self.own or ""
        return is_repository(wanted) and is_on_hub(own) and _repository(wanted) == _repository(own)


def _repository(model: str) -> str:
    return model.partition("@")[0]


def _directly_below(root: Path, name: str) -> Iterator[Path]:
    """Yield the root's folder of this name, unless it is a link that leads out of the root."""
    try:
        for entry in root.iterdir():
            if entry.name == name and entry.resolve().is_relative_to(root.resolve()) and entry.is_dir():
                yield entry
    except (OSError, RuntimeError):  # it is missing, or a link leads to itself
        return


def check_load_request(
    request: LoadRequest, checkpoint: Checkpoint, note_read: Callable[[], None] = lambda: None
) -> None:
    """Refuse another model, or layers that it does not have, before any tensor is loaded.

    `note_read` is called for each tensor of which some bytes were read.

    Raises:
        ModelError: naming both values.
    """
    check_model(request, checkpoint)
    check_contents(checkpoint, request.contents, note_read)
    check_layers(request, checkpoint)
    check_files(checkpoint, request.start, request.end)


def check_layers(request: LoadRequest, checkpoint: Checkpoint) -> None:
    """Raise ModelError, naming both values, for layers or hidden states that the model does not have."""
    spec = describe(checkpoint) if request.is_drafter else describe_model(checkpoint)
    layers = f"[{request.start}, {request.end}) of {request.num_layers} layers"
    if request.is_drafter:
        ends = (0, spec.num_layers) if spec.head and spec.head.num_taps else (spec.num_layers,)
        is_possible = request.start == 0 and request.end in ends
    else:
        is_possible = 0 < request.start < request.end <= spec.num_layers
    if request.num_layers != spec.num_layers or not is_possible:
        raise ModelError(f"cannot hold {layers}: its copy of {checkpoint.name} has {spec.num_layers}")
    if request.dtype != spec.dtype:
        expected, found = dtype_name(request.dtype), dtype_name(spec.dtype)
        raise ModelError(f"expected hidden states of {expected}, its copy of {checkpoint.name} makes {found}")


def check_model(request: LoadRequest, checkpoint: Checkpoint) -> None:
    """Raise ModelError, with both digests, for a model with another configuration or other tensor shapes."""
    ours, theirs = checkpoint.fingerprint, request.fingerprint
    for part, what in (("config", "config.json"), ("tokenizer", "tokenizer files"), ("tensors", "tensor headers")):
        here, there = getattr(ours, part), getattr(theirs, part)
        if here != there:
            raise ModelError(
                f"its {what} of {checkpoint.name} (sha256 {here[:12]}) and the coordinator's ({there[:12]}) differ; "
                "copy the same model to both nodes"
            )
