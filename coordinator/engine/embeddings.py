"""Embeddings: the states behind the final norm, pooled over a text's tokens, by the model's own configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, collect
from coordinator.engine.inputs import numbered
from coordinator.sessions.request import PoolingKind, RequestSpec
from worker.errors import InputError, ModelError
from worker.model.checkpoint import MOST_CONFIG_BYTES, Checkpoint
from worker.model.headers import read_json
from worker.model.model_spec import text_config

Vector = npt.NDArray[np.float32]

_AT_ONCE = 16  # texts: others wait for memory beside them
# By the keys of sentence-transformers' 1_Pooling/config.json, of which one is true, or by its newer `pooling_mode`.
_KINDS: dict[Any, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "mean": "mean", "lasttoken": "last"
}  # fmt: skip
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class Pooling:
    """How a model's states become the embedding of a text."""

    kind: PoolingKind
    is_normalised: bool = True  # to length 1
    dimensions: Sequence[int] = ()  # to which its embeddings may be cut

    def require_dimensions(self, wanted: int) -> None:
        """Raise InputError unless the model's embeddings may be cut to so many numbers."""
        if wanted not in self.dimensions:
            if not self.dimensions:
                raise InputError("dimensions", f"this model's embeddings cannot be cut, found {wanted}; leave it out")
            sizes = self.dimensions
            allowed = f"1 to {sizes[-1]}" if isinstance(sizes, range) else f"one of {', '.join(map(str, sizes))}"
            raise InputError("dimensions", f"expected {allowed}, found {wanted}")

    def finish(self, total: Vector, num_rows: int, dimensions: int | None) -> Vector:
        """Return the embedding, of D numbers or fewer, from the sum [D] of so many rows. Raises ModelError for NaN."""
        found = (total / num_rows)[:dimensions]
        if not np.isfinite(found).all():
            raise ModelError("the model's states are not finite, so they make no embedding")
        length = np.linalg.norm(found)
        return (found / length if self.is_normalised and length > 0 else found).astype(np.float32)


def read_pooling(checkpoint: Checkpoint, hidden_size: int, chosen: PoolingKind | None = None) -> Pooling:
    """Return how the model pools, by its files for sentence-transformers; `chosen` replaces the kind.

    Raises:
        InputError: the files do not say, or name what this server cannot do, as attention in both directions.
        ModelError: they are no JSON.
    """
    modules = read_json(checkpoint.folder / "modules.json", MOST_CONFIG_BYTES)
    types = [str(module.get("type")).rpartition(".")[2] for module in modules or () if isinstance(module, dict)]
    if others := sorted(set(types) - set(_MODULES)):
        raise InputError("model", f"expected only {', '.join(_MODULES)} in its modules.json, found {', '.join(others)}")
    for config in (checkpoint.config, text_config(checkpoint.config)):
        if config.get("is_causal") is False or config.get("use_bidirectional_attention") in (True, "all"):
            expected = "expected a model whose tokens attend to earlier ones only"
            found = "it was trained with attention in both directions, which is not computed here"
            raise InputError("model", f"{expected}; by its config.json {found}")
    sizes = checkpoint.config.get("matryoshka_dimensions")
    if not sizes and checkpoint.config.get("is_matryoshka") is True:
        sizes = range(1, hidden_size + 1)
    return Pooling(
        chosen or _kind_of(read_json(checkpoint.folder / "1_Pooling" / "config.json", MOST_CONFIG_BYTES)),
        is_normalised=not types or "Normalize" in types,
        dimensions=sizes if isinstance(sizes, list | range) else (),
    )


def _kind_of(config: Any) -> PoolingKind:
    if not isinstance(config, dict):
        raise InputError("model", "expected its 1_Pooling/config.json, found none; start the server with --pooling")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    found = ", ".join(modes) or str(config.get("pooling_mode"))
    if found not in _KINDS:
        raise InputError(
            "model", f"expected pooling of the mean or the last token in 1_Pooling/config.json, got {found}"
        )
    return _KINDS[found]


async def embed(
    engine: Engine, texts: Sequence[str | tuple[int, ...]], pooling: Pooling, dimensions: int | None = None
) -> list[tuple[Vector, int]]:
    """Return the embedding of each text and its number of tokens.

    Raises:
        InputError: a text has no tokens, or too many; of several it names `prompt.NUMBER`.
        ModelError: a state is not finite.
    """
    requests = []
    for number, text in enumerate(texts):
        spec = RequestSpec(text, 0, {"temperature": 0.0}, Decode("ar"), ignore_eos=True, pooling=pooling.kind)
        with numbered(number, texts):
            requests.append(await engine.prepare(spec))
    found = []
    for request, outputs in zip(requests, await collect(engine, requests, at_once=_AT_ONCE), strict=True):
        sums = [np.frombuffer(each, "<f4") for output in outputs for each in output.pooled]
        num_rows = len(request.prompt) - (request.pool_from or 0)
        found.append((pooling.finish(np.sum(sums, axis=0), num_rows, dimensions), len(request.prompt)))
    return found
