"""Mixed bits: which parts of a model suffer most from fewer bits, by quantising each alone. MLX thread only.

What suffers is the loss on a text, and the share of drafts that hold: guesses of MASK rows that the model itself would
have said there, after the guesses before them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from coordinator.cluster.progress import TokenReport
from coordinator.engine.tokenizer import Tokenizer
from coordinator.quality.quantize import QuantizeOptions, cast, quantised_modules
from worker.compute.held_tensors import TensorReader
from worker.errors import InputError
from worker.model.build import build, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.platform.files import reading
from worker.platform.machine import memory_budget
from worker.platform.text import format_bytes

HIGH_BITS = 8
_TEXT = Path(__file__).with_name("calibration.txt")
LENGTH = 256  # tokens of a sequence
_BLOCKS = 4  # of layers
_DRAFTS = 8  # MASK rows of a window
_PLACES = 2  # of a sequence at which a window begins
_BATCH = 8  # sequences at once
_LOGIT_BYTES = 2 + 4 + 4  # in bf16, in float32, and within the loss

RECIPE = "sensitivity"

Takes = Callable[[str, Any], bool]  # whether a module is quantised, by its path


def require_recipe(
    recipe: str | None, options: QuantizeOptions, target_bpw: float | None, calibration: Path | None
) -> None:
    """Raise InputError, which names the flag, for what does not go with the recipe, or needs one."""
    if recipe is None:
        if (target_bpw, calibration) != (None, None):
            field = "calibration" if target_bpw is None else "target_bpw"
            raise InputError(field, f"expected --recipe {RECIPE} or --method with it, got neither")
        return
    if target_bpw is None:
        raise InputError("target_bpw", "expected bits per weight with --recipe, such as 5, got none")
    if recipe != RECIPE or options.mode != "affine":
        raise InputError("recipe", f"expected {RECIPE} with affine, got {recipe} with {options.mode}")
    if options.bits >= HIGH_BITS:
        raise InputError("q_bits", f"expected fewer than the {HIGH_BITS} of other parts, got {options.bits}")


@dataclass(frozen=True)
class Group:
    """Modules of one kind in neighbouring layers."""

    name: str
    paths: tuple[str, ...]
    num_weights: int


@dataclass(frozen=True)
class Measure:
    """What a model does on a text."""

    loss: float  # nats per token
    drafts: float | None  # share that holds; None: the model was not trained for MASK rows


@dataclass(frozen=True)
class Sensitivity:
    """What the low bits of one group alone do."""

    group: Group
    loss: float  # nats per token more than without
    drafts: float | None  # share that no longer holds


def read_text(path: Path | None) -> str:
    """Return the text of a file; ours without one. Raises InputError if it cannot be read."""
    with reading("calibration", path or _TEXT):
        return (path or _TEXT).read_text(encoding="utf-8")


def read_sequences(checkpoint: Checkpoint, text: str) -> mx.array:
    """Return the text's tokens [N, LENGTH], without the rest. Raises InputError if the text is too short."""
    tokens = Tokenizer(checkpoint).encode(text, special=False)
    num = len(tokens) // LENGTH
    if not num:
        raise InputError("calibration", f"expected a text of at least {LENGTH} tokens, found {len(tokens)}")
    return mx.array(tokens[: num * LENGTH]).reshape(num, LENGTH)


class MeasuredModel:
    """A model that is whole in memory, and a text."""

    def __init__(self, checkpoint: Checkpoint, text: str) -> None:
        """
        Raises:
            InputError: the text is too short, or the model does not fit in memory. ModelError: it cannot be built.
        """
        self._tokens = read_sequences(checkpoint, text)
        spec = describe(checkpoint)
        logits = _LOGIT_BYTES * _BATCH * LENGTH * spec.vocab_size
        needed = sum(info.nbytes for info in checkpoint.tensors.values()) + logits
        if needed > (budget := memory_budget()):
            expected = f"expected {format_bytes(needed)} of memory for the whole model, found {format_bytes(budget)}"
            raise InputError("recipe", f"{expected}; give --keep NAME,... instead")
        self._mask_token = spec.mask_token
        self._model: Any = build(checkpoint, TensorReader(checkpoint, list(checkpoint.tensors)))
        cast(self._model, checkpoint.config)

    def measure(self) -> Measure:
        """Return what the model does on the text."""
        num, loss, held = self._tokens.shape[0], 0.0, 0
        for begin in range(0, num, _BATCH):
            batch = self._tokens[begin : begin + _BATCH]
            logits = self._model(batch).astype(mx.float32)
            loss += float(nn.losses.cross_entropy(logits[:, :-1], batch[:, 1:], reduction="sum"))
            if self._mask_token is None:
                continue
            for place in range(1, _PLACES + 1):
                first = place * (LENGTH - _DRAFTS) // _PLACES
                held += self._num_held(batch[:, :first], self._mask_token)
        num_drafts = num * _PLACES * _DRAFTS
        return Measure(loss / (num * (LENGTH - 1)), None if self._mask_token is None else held / num_drafts)

    def _num_held(self, tokens: mx.array, mask_token: int) -> int:
        """Return how many drafts after the tokens [B, L] hold, as `diffusion` finds them and checks them."""
        first = tokens.shape[1]
        masks = mx.full((tokens.shape[0], _DRAFTS), mask_token)
        drafts = self._said(mx.concatenate([tokens, masks], axis=1), mask_token)[:, first:]
        said = self._said(mx.concatenate([tokens, drafts], axis=1), mask_token)[:, first - 1 : -1]
        return int(mx.cumprod((said == drafts).astype(mx.int32), axis=1).sum())

    def _said(self, tokens: mx.array, mask_token: int) -> mx.array:
        """Return the likeliest token of each row [B, L], which is never a MASK."""
        logits = self._model(tokens)
        logits[..., mask_token] = -mx.inf
        return mx.argmax(logits, axis=-1)


class Ablation(MeasuredModel):
    """What happens to a model whose parts are quantised one by one."""

    def __init__(self, checkpoint: Checkpoint, options: QuantizeOptions, text: str) -> None:
        """Raises as `MeasuredModel` does."""
        super().__init__(checkpoint, text)
        self._options = options
        takes = quantised_modules(self._model, options)
        self.groups = module_groups(self._model, lambda path, module: takes(path, module) is True)
        arrays = [array for _, array in tensors_of_module(self._model)]
        self._num, self._nbytes = sum(array.size for array in arrays), sum(array.nbytes for array in arrays)

    def run(self, target: float, report: TokenReport) -> list[Sensitivity]:
        """Quantise each group alone; `report` gets a 1 after each, and the number of the text's tokens.

        Raises:
            InputError: not even the low bits reach the target.
        """
        num_low = sum(group.num_weights for group in self.groups)
        least_bits(num_low, self._options, num=self._num, nbytes=self._nbytes, target=target)
        whole, modules, found = self.measure(), dict(self._model.named_modules()), list[Sensitivity]()
        for group in self.groups:
            with _quantised([modules[path] for path in group.paths], self._options):
                part = self.measure()
            drafts = None if part.drafts is None or whole.drafts is None else whole.drafts - part.drafts
            found.append(Sensitivity(group, part.loss - whole.loss, drafts))
            report(1, self._tokens.size)
        return found

    def choose(self, found: Sequence[Sensitivity], target: float) -> list[Sensitivity]:
        """Return the groups of HIGH_BITS. Raises InputError if not even the low bits reach the target."""
        return choose_bits(found, self._options, num=self._num, nbytes=self._nbytes, target=target)


def module_groups(model: Any, takes: Takes) -> list[Group]:
    """Return the modules that are quantised, by kind and block of layers."""
    found: dict[str, list[tuple[str, Any]]] = {}
    quantised = [(path, module) for path, module in model.named_modules() if takes(path, module)]
    layers = sorted({layer for path, _ in quantised if (layer := _layer(path)[0]) is not None})
    size = max(1, -(-len(layers) // _BLOCKS))
    for path, module in sorted(quantised):
        layer, kind = _layer(path)
        if layer is not None:
            block = layers[layers.index(layer) // size * size :][:size]
            kind = f"layers {block[0]} to {block[-1]}, {kind}"
        found.setdefault(kind, []).append((path, module))
    return [
        Group(name, tuple(path for path, _ in members), sum(module.weight.size for _, module in members))
        for name, members in found.items()
    ]


def _layer(path: str) -> tuple[int | None, str]:
    """Return the number of a module's layer and its kind; no number outside of the layers."""
    steps = path.split(".")
    number = next((place for place, step in enumerate(steps) if step.isdigit()), None)
    return (None, steps[-1]) if number is None else (int(steps[number]), ".".join(steps[number + 1 : number + 2]))


def least_bits(num_low: int, options: QuantizeOptions, *, num: int, nbytes: int, target: float) -> float:
    """Return the bits of all weights if `num_low` of them have the low ones.

    Args:
        num, nbytes: of all weights before.
    Raises:
        InputError: not even these reach the target of bits per weight, or it is beyond HIGH_BITS for all.
    """
    low, item_bits = options.bits, 8 * nbytes / num
    saved = item_bits - low - 2 * item_bits / options.group_size  # per weight: groups have a scale and a bias
    num_bits = 8 * nbytes - num_low * saved
    if num_bits > target * num:
        raise InputError(
            "target_bpw", f"expected at least {num_bits / num:.2f} with {low} bits for all, got {target:g}"
        )
    most_bits = num_bits + (HIGH_BITS - low) * num_low
    if most_bits < target * num:
        raise InputError(
            "target_bpw", f"expected at most {most_bits / num:.2f}, as with {HIGH_BITS} bits for all, got {target:g}"
        )
    return num_bits


def choose_bits(
    found: Sequence[Sensitivity], options: QuantizeOptions, *, num: int, nbytes: int, target: float
) -> list[Sensitivity]:
    """Return the groups of HIGH_BITS: those that suffer most per weight, while the mean allows it.

    A group suffers by its shares of all groups' loss and of all drafts that no longer hold. Arguments and errors are
    those of `least_bits`.
    """
    num_low = sum(each.group.num_weights for each in found)
    num_bits = least_bits(num_low, options, num=num, nbytes=nbytes, target=target)
    losses, drafts = (_shares([getattr(each, name) or 0.0 for each in found]) for name in ("loss", "drafts"))
    harms = [(loss + lost) / each.group.num_weights for each, loss, lost in zip(found, losses, drafts, strict=True)]
    high = list[Sensitivity]()
    for _, number in sorted(((harm, number) for number, harm in enumerate(harms)), reverse=True):
        more = (HIGH_BITS - options.bits) * found[number].group.num_weights
        if num_bits + more <= target * num:
            high.append(found[number])
            num_bits += more
    return high


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(max(0.0, value) for value in values)
    return [max(0.0, value) / total if total else 0.0 for value in values]


@contextmanager
def _quantised(modules: Sequence[Any], options: QuantizeOptions) -> Iterator[None]:
    """Let the modules compute with quantised weights."""
    before = [module.weight for module in modules]
    for module in modules:
        parts = mx.quantize(module.weight, options.group_size, options.bits)
        found = mx.dequantize(*parts, group_size=options.group_size, bits=options.bits)
        module.weight = found.astype(module.weight.dtype)
    try:
        yield
    finally:
        for module, weight in zip(modules, before, strict=True):
            module.weight = weight
