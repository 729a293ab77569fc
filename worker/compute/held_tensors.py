"""Tensors of a checkpoint on this node: bound to a module lazily, then read from disk one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from worker.errors import ModelError
from worker.model.build import Absent, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.headers import TensorInfo
from worker.platform.mlx_memory import mlx_errors_named, raise_late_errors

DIGEST_BYTES = 4 * 2**20  # of a tensor that are hashed at once


class TensorReader(Absent):
    """Returns lazy arrays of the wanted tensors of a checkpoint, and stand-ins for all others."""

    def __init__(self, checkpoint: Checkpoint, wanted: Sequence[str]) -> None:
        super().__init__()
        self._folder = checkpoint.folder
        self._wanted = set(wanted)
        self._files: dict[str, dict[str, mx.array]] = {}

    def __call__(self, name: str, info: TensorInfo) -> mx.array:
        if name not in self._wanted:
            return super().__call__(name, info)
        if info.file not in self._files:
            path = self._folder / info.file
            try:
                self._files[info.file] = mx.load(str(path))  # type: ignore[assignment]
            except RuntimeError as error:
                raise ModelError(f"cannot read {path}: {error}") from error
        return self._files[info.file][name]


class HeldTensors:
    """The tensors of a module."""

    def __init__(self, module: Any, what: str, held: dict[str, mx.array] | None) -> None:
        """Bind the tensors that are already in memory.

        Args:
            what: a description for errors, such as "layers [2, 4)".
            held: tensors in memory, by the module's own names. It is emptied, so that unused ones are freed.
        """
        self._module, self._what = module, what
        if held:
            own = {name: held[name] for name, _ in self._listed if name in held}
            module.load_weights(list(own.items()), strict=False)
            held.clear()
        self.nbytes = sum(array.nbytes for _, array in self._listed)

    @property
    def _listed(self) -> list[tuple[str, mx.array]]:
        return tensors_of_module(self._module)

    @property
    def tensors(self) -> dict[str, mx.array]:
        """The tensors by the model's own names, which are the same in every shard."""
        return dict(self._listed)

    def materialise(self, progress: Callable[[int], None]) -> None:
        """Read the tensors from disk, one after another; `progress` gets the size of each one, in bytes.

        Raises:
            ModelError: a file ends early or cannot be read.
            OutOfMemory: the tensors do not fit.
        """
        for _, array in self._listed:
            try:
                with mlx_errors_named(f"with {self._what}, {self.nbytes / 2**30:.2f} GiB"):
                    mx.eval(array)
                    raise_late_errors(waits=True)
            except RuntimeError as error:
                raise ModelError(f"cannot read the tensors of {self._what}: {error}") from error
            progress(array.nbytes)

    def digests(self) -> dict[str, str]:
        """Return the BLAKE2b digest of every tensor, by name."""
        found: dict[str, str] = {}
        for _ in self.digest_into(found):
            pass
        return found

    def digest_into(self, found: dict[str, str]) -> Generator[None, None, None]:
        """Add the digest of every tensor to `found`, yielding every few milliseconds."""
        for name, array in self._listed:
            raw = np.array(array.reshape(-1).view(mx.uint8), copy=False)
            digest = hashlib.blake2b(digest_size=16)
            for first in range(0, len(raw), DIGEST_BYTES):
                digest.update(raw[first : first + DIGEST_BYTES].data)
                yield
            found[name] = digest.hexdigest()
