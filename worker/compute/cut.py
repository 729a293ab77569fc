"""A model cut to the layers of one stage, run by the model's own forward over its whole list of layers.

Layers of other stages have lost their arrays, and their doors let nothing run: those before the stage return what came
in, and behind its last layer the forward is left.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from worker.memory.lane import View
from worker.model.anatomy import Anatomy, as_returned, as_rows, strip_front
from worker.model.build import tensors_of_module
from worker.model.doors import Run, put_doors
from worker.model.skeleton import drop_arrays, drop_part, skeleton_of


class _Left(Exception):
    """The last layer of the stage has run; carries what it returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class _Keeper:
    """Stands at the doors of a stage. Knows the numbers of its layers, not the layers."""

    def __init__(self, start: int, end: int, anatomy: Anatomy) -> None:
        self.incoming: mx.array | None = None
        self._start, self._end = start, end
        self._anatomy = anatomy
        self.is_past = False  # all layers are: only norm and head are wanted

    def enter(self, index: int, run: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if index < self._start or self.is_past:
            assert self.incoming is not None
            return as_returned(self.incoming, self._anatomy.shapes, self._anatomy.returns[index])
        view = next((value for value in (*args, *kwargs.values()) if isinstance(value, View)), None)
        result = run(*args, **kwargs) if view is None else view.run(run, *_hidden_first(args, kwargs))
        if index == self._end - 1:
            raise _Left(result)
        return result


class CutModel:
    """Layers [start, end) of one of mlx-lm's models."""

    def __init__(self, model: Any, anatomy: Anatomy, start: int, end: int) -> None:
        """Take everything that other stages hold out of the model."""
        skeleton = skeleton_of(model)
        is_last = end == anatomy.num_layers
        self.layers = skeleton.layers[start:end]
        for layer in [*skeleton.layers[:start], *skeleton.layers[end:]]:
            drop_arrays(layer, besides=self.layers)
        if start > 0 and not (is_last and anatomy.tied):
            strip_front(skeleton, anatomy)
        if not is_last:
            for _, (parent, key) in skeleton.back:
                drop_part(parent, key, besides=self.layers)
        self._model = model
        self._is_first = start == 0
        self._keeper = _Keeper(start, end, anatomy)
        self._anatomy = anatomy
        put_doors(skeleton.layers, self._keeper)

    @property
    def tensors(self) -> list[tuple[str, mx.array]]:
        """All that this stage holds, by the model's own names."""
        return tensors_of_module(self._model)

    def replace(self, tensors: dict[str, mx.array]) -> None:
        """Hold these instead of what has their names."""
        self._model.load_weights(list(tensors.items()), strict=False)

    def run(self, x: mx.array, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        """Token ids [B, L] on the first stage, hidden states [B, L, D] elsewhere, to hidden states [B, L, D].

        `ids` are the token ids elsewhere. `caches` are for the whole list of layers, and take the rows.
        """
        self._keeper.incoming = None if self._is_first else x
        try:
            self._model(x if self._is_first else ids, cache=caches)
        except _Left as left:
            return as_rows(left.result, self._anatomy.shapes)
        finally:
            self._keeper.incoming = None
        raise AssertionError("the forward came to its end before the stage did")

    def logits(self, h: mx.array, caches: Sequence[Any]) -> mx.array:
        """Hidden states [1, N, D] of the last layer to logits [1, N, V]: norm, head and what else follows the layers.

        `caches` hold nothing; what an embedding leaves in them is of no use to anybody.
        """
        self._keeper.incoming, self._keeper.is_past = h, True
        try:
            return self._model(mx.zeros(h.shape[:2], mx.int32), cache=caches)
        finally:
            self._keeper.incoming, self._keeper.is_past = None, False


def _hidden_first(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """A layer's arguments, beginning with its hidden states even where these came by their name."""
    if args:
        return args, kwargs
    name, *others = kwargs
    return [kwargs[name]], {key: kwargs[key] for key in others}
