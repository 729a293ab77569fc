"""Quantises a model by a method of mlx_lm that looks at a text: AWQ, GPTQ, or bits chosen by gradients.

The model is whole in memory. MLX thread only.
"""

import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.quant import awq, dynamic_quant, gptq
from mlx_lm.utils import compute_bits_per_weight, load_config, quantize_model, save

from coordinator.cluster.progress import show_tokens
from coordinator.quality.quantize import (
    AFFINE_BITS,
    QuantizeOptions,
    copy_small_files,
    require_unquantised,
)
from coordinator.quality.sensitivity import HIGH_BITS, least_bits, read_sequences
from worker.compute.held_tensors import TensorReader
from worker.errors import BrigadeError, InputError, ModelError, first_line
from worker.model.build import build, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.module_tree import module_tree_of
from worker.model.quantisation import MISFITS
from worker.platform.machine import memory_budget
from worker.platform.text import format_bytes

_FUNCTIONS: dict[str, ModuleType] = {"awq": awq, "gptq": gptq, "dynamic": dynamic_quant}
_BITS = {
    "awq": AFFINE_BITS,
    "gptq": (2, 4, 8),  # mlx_lm's code packs no others
    "dynamic": tuple(bits for bits in AFFINE_BITS if bits < HIGH_BITS),
}
# as mlx_lm's own commands: what an embedding and, with GPTQ, other modules that are no matrix products have at least
_AWQ_EMBED = {"embed_bits": 4, "embed_group_size": 32}
_GPTQ_FALLBACK_BITS = 6
_BATCH = {"gptq": 8, "dynamic": 4}  # sequences at once, by mlx_lm's code
_AWQ_SEQUENCES = 128  # as mlx_lm's own command: AWQ holds what a block makes of all of them
_EXPERTS = 8  # that take a row, at most


def require_method(method: str, options: QuantizeOptions, recipe: str | None, target_bpw: float | None) -> None:
    """Raise InputError, which names the flag, for what does not go with the method."""
    known = ", ".join(map(str, _BITS.get(method, ())))
    for field, fits, expected, got in (
        ("method", method in _BITS, ", ".join(_BITS), method),
        ("recipe", recipe is None, "no --recipe", recipe),
        ("keep", not options.keep, "no --keep", ",".join(options.keep)),
        ("q_mode", options.mode == "affine", "affine", options.mode),
        ("q_bits", options.bits in _BITS.get(method, ()), known, options.bits),
        ("target_bpw", target_bpw is not None or method != "dynamic", "bits per weight, such as 5", "none"),
        ("target_bpw", target_bpw is None or method == "dynamic", "no --target-bpw, but --q-bits", target_bpw),
    ):
        if not fits:
            raise InputError(field, f"expected {expected}{f' with --method {method}' * (field != 'method')}, got {got}")


class MethodRun:
    """A model that is to be quantised by a method, of which only headers are read before `run`."""

    def __init__(
        self, checkpoint: Checkpoint, method: str, options: QuantizeOptions, target_bpw: float | None, text: str
    ) -> None:
        """
        Raises:
            InputError: the method does not know the type, the groups do not divide its matrices, the text is too
                short, not even the low bits reach the target, or memory does not suffice. ModelError: it is no model.
        """
        require_unquantised(checkpoint)
        kind = checkpoint.config["model_type"]
        if method == "awq" and kind not in awq.AWQ_MODEL_CONFIGS:
            types = ", ".join(awq.AWQ_MODEL_CONFIGS)
            raise InputError("method", f"expected a type that awq knows ({types}), found {kind}; use gptq or dynamic")
        self._checkpoint, self._method, self._options, self._target = checkpoint, method, options, target_bpw
        model: Any = build(checkpoint)
        self._matrices = [(path, each) for path, each in model.named_modules() if hasattr(each, "to_quantized")]
        size = options.group_size
        for path, each in self._matrices:
            if (width := each.weight.shape[-1]) % size:
                raise InputError("q_group_size", f"expected a divisor of {width}, as {path} is wide, got {size}")
        arrays = [array for _, array in tensors_of_module(model)]
        self._nbytes, self._num = sum(array.nbytes for array in arrays), sum(array.size for array in arrays)
        if target_bpw is not None:
            num_low = sum(each.weight.size for _, each in self._matrices)
            least_bits(num_low, options, num=self._num, nbytes=self._nbytes, target=target_bpw)
        tokens = read_sequences(checkpoint, text)
        self._tokens = tokens[:: -(-len(tokens) // _AWQ_SEQUENCES)] if method == "awq" else tokens
        needed = self._needed(model)
        if needed > (budget := memory_budget()):
            expected = f"expected {format_bytes(needed)} of memory for {method}, found {format_bytes(budget)}"
            raise InputError("method", f"{expected}; without --method one tensor at a time is enough")

    def write(self, out: Path) -> tuple[int, float]:
        """Quantise the model and write it into this folder.

        Returns:
            The bytes of its weights, and their bits per weight.
        Raises:
            InputError: the disk is too full. ModelError: mlx_lm's code fails on this model. BrigadeError: the folder
            cannot be written.
        """
        for path in out.glob("*.safetensors"):
            path.unlink()  # of an interrupted run
        needed = int(self._num * (self._target or self._options.bits + 1) / 8)  # 1: scales and biases
        if needed > (free := shutil.disk_usage(out).free):
            found = f"found {format_bytes(free)}; make room"
            raise InputError("", f"expected {format_bytes(needed)} of free disk at {out}, {found}")
        checkpoint = self._checkpoint
        model: Any = build(checkpoint, TensorReader(checkpoint, list(checkpoint.tensors)))
        functions: Any = _FUNCTIONS[self._method]
        functions.tqdm = _Steps
        try:
            with redirect_stdout(sys.stderr):
                model, config = getattr(self, f"_{self._method}")(model, load_config(checkpoint.folder))
                is_finite = bool(mx.isfinite(model(self._tokens[:1])).all())
        except MISFITS as error:
            reason = f"mlx_lm's {self._method} fails on this model: {first_line(error)}"
            raise ModelError(f"{checkpoint.name}: {reason}; try another method, or none") from error
        if not is_finite:  # GPTQ inverts matrices, and MLX does not tell that one has no inverse
            reason = f"after mlx_lm's {self._method} it no longer gives numbers"
            raise ModelError(f"{checkpoint.name}: {reason}; try another method, or none")
        bits_per_weight = float(compute_bits_per_weight(model))
        tokenizer: Any = SimpleNamespace(save_pretrained=partial(copy_small_files, checkpoint))  # as it is
        try:
            save(out, checkpoint.folder, model, tokenizer, config)
        except OSError as error:
            raise BrigadeError(f"cannot write {out}: {error.strerror}; the same command begins anew") from error
        except RuntimeError as error:
            raise BrigadeError(f"cannot write {out}: {first_line(error)}; the same command begins anew") from error
        return sum(path.stat().st_size for path in out.glob("*.safetensors")), bits_per_weight

    def _awq(self, model: Any, config: Any) -> tuple[Any, Any]:
        bits, size = self._options.bits, self._options.group_size
        embed = _AWQ_EMBED | {"embed_bits": max(bits, _AWQ_EMBED["embed_bits"])}
        settings = awq.AWQ_MODEL_CONFIGS[config["model_type"]]
        awq.awq_quantize(model, self._tokens, settings, bits=bits, group_size=size, **embed)
        config = awq.update_config(model, config)
        config["quantization"] |= {"bits": bits, "group_size": size}  # which that function leaves at 4 and 64
        return model, config

    def _gptq(self, model: Any, config: Any) -> tuple[Any, Any]:
        bits, size = self._options.bits, self._options.group_size
        found = gptq.gptq_quantize(model, self._tokens, bits, size, max(bits, _GPTQ_FALLBACK_BITS), size)
        model, config["quantization"] = found
        return model, config

    def _dynamic(self, model: Any, config: Any) -> tuple[Any, Any]:
        bits, size = self._options.bits, self._options.group_size
        high = {"bits": HIGH_BITS, "group_size": size}
        found = dict(dynamic_quant.estimate_sensitivities(model, self._tokens, bits, size, HIGH_BITS, size))
        least = dynamic_quant.estimate_threshold(model, found, self._target, bits, size, HIGH_BITS, size)
        choose = lambda path, module: dict(high) if found[path] > least else True  # noqa: E731
        return quantize_model(model, config, size, bits, quant_predicate=choose)

    def _needed(self, model: Any) -> int:
        """Return about the most bytes that mlx_lm's functions hold at a time, by their code (mlx-lm 0.32.2)."""
        num_rows = min(len(self._tokens), _BATCH.get(self._method, len(self._tokens))) * self._tokens.shape[1]
        layers = [sum(map(_row_bytes, layer.modules())) for layer in module_tree_of(model).layers]
        block = 3 * num_rows * max(layers)  # 3: what lies between matrices, too; peaks were 0.6 to 0.8 of all this
        if self._method == "awq":  # the model, of which each layer is replaced at once
            return self._nbytes + block
        if self._method == "gptq":
            # the model to the end, its quantised copy, and a float32 Hessian [in, in] of every matrix
            inner = (nn.Linear, SwitchLinear)
            hessians = 4 * sum(each.weight.shape[-1] ** 2 for _, each in self._matrices if isinstance(each, inner))
            return self._nbytes + self._num * (self._options.bits + 1) // 8 + hessians + block
        # the model, its quantised copy, gradients of a batch, their float32 sum; the way back needs all layers' rows
        rows = 3 * num_rows * sum(_row_bytes(each) for _, each in self._matrices)
        return 3 * self._nbytes + 4 * self._num + rows


def _row_bytes(module: Any) -> int:
    """Return the bytes of a row's input and output; 0 of a module that is not quantised."""
    if not hasattr(module, "to_quantized"):
        return 0
    *experts, num_out, num_in = module.weight.shape
    return int(module.weight.dtype.size * (num_in + num_out) * min(_EXPERTS, math.prod(experts)))


class _Steps:
    """The progress of mlx_lm's loops, which call it as tqdm."""

    write = staticmethod(lambda line: None)

    def __init__(self, items: Iterable[Any], total: int | None = None, desc: str = "Quantizing") -> None:
        self._items, self._what = items, desc
        self._total = len(items) if isinstance(items, Sized) else total or 0

    def __iter__(self) -> Iterator[Any]:
        with show_tokens(self._what, self._total) as report:
            for item in self._items:
                yield item
                report(1, 0)
