"""Copies: this node's own models, and behind them what it has received of others."""

from collections.abc import Callable

from protos.brigade_pb2 import LoadRequest
from worker.errors import ModelError, ModelLacking
from worker.model.checkpoint import Checkpoint
from worker.model.describe import shard_tensors
from worker.model.headers import unpack_headers
from worker.node.own_models import OwnModels
from worker.store.locks import Lease
from worker.store.store import Store

Check = Callable[[Checkpoint], None]


class Copies:
    """Where the shards of a node come from. Blocks: for threads beside the event loop."""

    def __init__(self, models: OwnModels, store: Store | None = None) -> None:
        """`store` takes what coordinators send; without it this node loads its own models only."""
        self.store = store
        self._models = models

    def open(self, request: LoadRequest, check: Check) -> Checkpoint:
        """The first copy that passes the check.

        Raises:
            ModelLacking: none does, and one may be sent.
            ModelError: none does.
        """
        known = unpack_headers(request.contents.headers)
        try:
            return self._models.open(request.model, known, check)
        except ModelError as error:
            if self.store is None:
                raise
            try:
                received = self.store.open(request.model, request.fingerprint, known, request.digests)
                check(received)
            except ModelError:
                raise ModelLacking(error.message) from error
            return received

    def lease(self, checkpoint: Checkpoint, start: int, end: int) -> Lease:
        """Keep what was received of these layers from being removed, until the lease is closed.

        Raises:
            ModelLacking: it is removed by now.
        """
        if self.store is None:
            return Lease()
        try:
            return self.store.lease(checkpoint, shard_tensors(checkpoint, start, end))
        except ModelError as error:
            raise ModelLacking(error.message) from error
