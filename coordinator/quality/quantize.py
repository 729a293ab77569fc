"""Quantises a checkpoint tensor by tensor, from disk to disk: what is in memory at a time is one tensor and its source.

mlx-lm builds and quantises the model, whose arrays are unread until each is written: the result is that of its
`convert`. Files grow in the order of their tensors, so that a run that was killed goes on after the last whole one.
MLX arrays are evaluated on the calling thread.
"""

import fcntl
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.convert import MODEL_CONVERSION_DTYPES
from mlx_lm.utils import (
    compute_bits_per_weight,
    get_total_parameters,
    load_config,
    make_shards,
    quantize_model,
    save_config,
)

from coordinator.cluster.progress import ByteReport
from worker.compute.held_tensors import TensorReader
from worker.errors import BrigadeError, InputError, first_line
from worker.model.build import MLX_DTYPES, build
from worker.model.checkpoint import SMALL_FILES, Checkpoint
from worker.model.headers import begin_of_file
from worker.model.model_spec import text_config
from worker.model.quantisation import MISFITS, misfit, quantisation_of
from worker.platform.files import sync_file, writing
from worker.platform.mlx_memory import raise_late_errors
from worker.platform.text import format_bytes

Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
MODES: tuple[Mode, ...] = get_args(Mode)
AFFINE_BITS, _AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits, weights per group

_STATE = "quantize.json"  # in the folder until it is whole: which conversion it is of
_INDEX = "model.safetensors.index.json"
_PART = ".part"  # ends the names of files that are not whole
_OWN_FILES = ("config.json", _INDEX, "hf_quant_config.json")  # of the source, which are written anew
_DTYPES = {dtype: name for name, dtype in reversed(MLX_DTYPES.items()) if not name.startswith("F8")}


@dataclass(frozen=True)
class QuantizeOptions:
    """How the weights are quantised, and the modules that are not. Made by `quantize_options`."""

    mode: Mode
    bits: int
    group_size: int
    keep: tuple[str, ...] = ()  # steps of modules' paths, such as lm_head
    bits_of: Mapping[str, int] = field(default_factory=dict)  # of modules, by their paths; others have `bits`


def quantize_options(mode: str, bits: int | None, group_size: int | None, keep: Sequence[str]) -> QuantizeOptions:
    """Return the options, with mlx-lm's defaults. Raises InputError for what no kernel takes."""
    if mode not in MODES:
        raise InputError("q_mode", f"expected {', '.join(MODES)}, got {mode!r}")
    fixed = _FIXED.get(mode)
    for name, value, known in (
        ("q_bits", bits, (fixed[0],) if fixed else AFFINE_BITS),
        ("q_group_size", group_size, (fixed[1],) if fixed else _AFFINE_GROUPS),
    ):
        if value is not None and value not in known:
            raise InputError(name, f"expected {', '.join(map(str, known))} with {mode}, got {value}")
    usual_bits, usual_size = fixed or (4, 64)
    return QuantizeOptions(mode, bits or usual_bits, group_size or usual_size, tuple(keep))


def require_unquantised(checkpoint: Checkpoint) -> None:
    """Raise InputError if the checkpoint is quantised already."""
    if quantisation_of(checkpoint).parameters is not None:
        raise InputError("", f"expected weights that are not quantised, found those of {checkpoint.name}")


def require_new(folder: Path) -> None:
    """Raise InputError if the folder holds anything."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("", f"{folder} exists already; give another folder")


def require_new_or_unfinished(folder: Path) -> None:
    """Raise InputError if the folder holds anything but an unfinished conversion."""
    if not (folder / _STATE).exists():
        require_new(folder)


def quantised_modules(model: Any, options: QuantizeOptions) -> Callable[[str, Any], Any]:
    """Return what says of a module, by its path, whether it is quantised, or how if otherwise than most."""
    own_choice = getattr(model, "quant_predicate", None)

    def choose(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % options.group_size:
            return False
        if set(path.split(".")) & set(options.keep):
            return False
        bits = options.bits_of.get(path, options.bits)
        if bits != options.bits:
            return {"group_size": options.group_size, "bits": bits, "mode": options.mode}
        return own_choice(path, module) if own_choice else True

    return choose


class QuantizedModel:
    """The tensors of a quantised model, unread until they are written."""

    def __init__(self, checkpoint: Checkpoint, options: QuantizeOptions) -> None:
        """
        Raises:
            ModelError: the model cannot be built. InputError: it is quantised already, or has no module to keep.
        """
        require_unquantised(checkpoint)
        model: Any = build(checkpoint, TensorReader(checkpoint, list(checkpoint.tensors)))
        config = load_config(checkpoint.folder)
        cast(model, config)
        known = {step for path, _ in model.named_modules() for step in path.split(".")}
        if "embed_tokens" in options.keep:
            known.add("lm_head")  # which is the embedding in some models
        if unknown := [name for name in options.keep if name not in known]:
            if unknown[0] == "lm_head" and "embed_tokens" in known:
                raise InputError(
                    "keep", "expected embed_tokens, found lm_head: in this model the embedding is the head, too"
                )
            named = ", ".join(sorted(name for name in known if name and not name.isdigit()))
            raise InputError("keep", f"expected names of modules ({named}), found {unknown[0]!r}")
        choose = quantised_modules(model, options)
        try:
            with redirect_stdout(io.StringIO()):  # it prints
                how = (options.group_size, options.bits, options.mode)
                model, self.config = quantize_model(model, config, *how, quant_predicate=choose)
        except MISFITS as error:
            raise misfit(checkpoint, first_line(error)) from error
        self.num_parameters = int(get_total_parameters(model))
        self.bits_per_weight = float(compute_bits_per_weight(model))
        self.keeps_vision = "vision_tower" in getattr(model, "model", {})
        files = list(map(WeightFile, make_shards(dict(tree_flatten(model.parameters())))))
        num = len(files)
        names = [f"model-{number:05d}-of-{num:05d}.safetensors" for number in range(1, num + 1)]
        # by the names that mlx-lm gives them
        self.files = dict(zip(names if num > 1 else ["model.safetensors"], files, strict=True))
        self.nbytes = sum(file.nbytes for file in files)


class WeightFile:
    """The tensors of a weight file, in their order. Each is let go of once it is written or known to be."""

    def __init__(self, tensors: dict[str, mx.array]) -> None:
        """Take the tensors out of this mapping, so that nothing else holds them."""
        arrays = list(tensors.items())
        tensors.clear()
        self.names = [name for name, _ in arrays]
        self.ends = list(accumulate(array.nbytes for _, array in arrays))
        entries = [(name, _DTYPES[array.dtype], array.shape, array.nbytes) for name, array in arrays]
        self.header = begin_of_file(entries, {"format": "mlx"})
        self._arrays: list[mx.array | None] = [array for _, array in arrays]

    @property
    def nbytes(self) -> int:
        return len(self.header) + (self.ends[-1] if self.ends else 0)

    def whole_tensors(self, path: Path) -> int:
        """Return how many tensors an unfinished file has; 0 if it is missing or another one."""
        if not path.exists():
            return 0
        with path.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                return 0
        data = path.stat().st_size - len(self.header)
        return sum(end <= data for end in self.ends)

    def write(self, path: Path, report: ByteReport) -> None:
        """Write the file, from the first tensor on that an unfinished one lacks."""
        part = path.with_name(path.name + _PART)
        num_done = self.whole_tensors(part)
        done = len(self.header) + (self.ends[num_done - 1] if num_done else 0)
        with part.open("r+b" if num_done else "wb") as file:
            if num_done:
                file.truncate(done)
                file.seek(done)
            else:
                file.write(self.header)
            self._arrays[:num_done] = [None] * num_done
            report(done, num_done > 0)
            for number in range(num_done, len(self._arrays)):
                array, self._arrays[number] = self._arrays[number], None
                assert array is not None
                file.write(bytes_of(array))
                report(array.nbytes, False)
                del array
                mx.clear_cache()  # the next tensor has another size
            file.flush()
            sync_file(file.fileno())
        part.rename(path)


def write_model(
    model: QuantizedModel, checkpoint: Checkpoint, folder: Path, state: Mapping[str, Any], report: ByteReport
) -> None:
    """Write the folder of a quantised model, or the rest of it.

    Args:
        state: what tells this conversion from others, as JSON.
    Raises:
        InputError: the folder holds something else, another run writes it, or there is not enough room.
        BrigadeError: it cannot be written.
    """
    with opened(folder, state):
        files = model.files
        held = [*(folder / name for name in files), *(folder / f"{name}{_PART}" for name in files)]
        missing = model.nbytes - sum(path.stat().st_size for path in held if path.exists())
        if missing > (free := shutil.disk_usage(folder).free):
            needed = f"expected {format_bytes(missing)} of free disk at {folder}, found {format_bytes(free)}"
            raise InputError("", f"{needed}; make room, and the same command continues")
        try:
            for name, file in files.items():
                path = folder / name
                if path.exists():
                    report(path.stat().st_size, True)
                else:
                    file.write(path, report)
            _write_rest(model, checkpoint, folder)
        except OSError as error:
            raise BrigadeError(f"cannot write {folder}: {error.strerror}; the same command continues") from error


def copy_small_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy what a quantised copy has from its source: tokenizer, chat template, generation settings, code."""
    for path in sorted(checkpoint.folder.iterdir()):
        is_small = any(fnmatchcase(path.name, pattern) for pattern in (*SMALL_FILES, "*.py"))
        if is_small and path.is_file() and path.name not in _OWN_FILES:
            shutil.copyfile(path, folder / path.name)


def begun_parts(folder: Path, state: Mapping[str, Any]) -> list[Any]:
    """Return the parts that an unfinished conversion of this `state` has measured; none without one."""
    try:
        found = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    parts = found.pop("parts", []) if isinstance(found, dict) else []
    return parts if found == json.loads(json.dumps(state)) else []


@contextmanager
def opened(folder: Path, state: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder for the conversion that `state` identifies, and mark it as whole in the end.

    Raises:
        InputError: the folder holds something else, or another run writes it. BrigadeError: it cannot be written.
    """
    path, wanted = folder / _STATE, json.dumps(state, sort_keys=True)
    require_new_or_unfinished(folder)
    with writing("", folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8", errors="replace")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError("", f"another run writes {folder}") from error
        file.seek(0)
        if not wanted.startswith(found := file.read()):  # a full disk may have left its beginning only
            raise InputError("", f"{folder} holds a part of another conversion; give another folder, or remove it")
        is_whole = keeps_parts = False
        try:
            if found != wanted:
                with writing("", folder):
                    path.write_text(wanted, encoding="utf-8")
                    sync_file(file.fileno())
            keeps_parts = "parts" in state  # for the next run
            yield
            is_whole = True
        finally:
            is_empty = not keeps_parts and [each.name for each in folder.iterdir()] == [_STATE]
            if is_whole or is_empty:
                path.unlink()


def _write_rest(model: QuantizedModel, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the index, the configuration, and the source's small files."""
    places = {tensor: name for name, file in model.files.items() for tensor in file.names}
    total = sum(file.ends[-1] for file in model.files.values() if file.ends)
    metadata = {"total_size": total, "total_parameters": model.num_parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")
    copy_small_files(checkpoint, folder)
    save_config(model.config, folder / "config.json", keep_vision_config=model.keeps_vision)


def cast(model: Any, config: Mapping[str, Any]) -> None:
    """Give the parameters the dtype of the configuration, as mlx-lm's `convert` does."""
    name = config.get("torch_dtype") or text_config(config).get("dtype")
    if name not in MODEL_CONVERSION_DTYPES:
        return
    dtype, may_cast = getattr(mx, name), getattr(model, "cast_predicate", lambda name: True)

    def of_dtype(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if may_cast(name) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(of_dtype, model.parameters()))


def bytes_of(array: mx.array) -> memoryview:
    """Return the array's numbers as they are in memory, row by row."""
    flat = mx.contiguous(array).reshape(-1)
    mx.eval(flat)
    raise_late_errors(waits=True)
    return memoryview(flat.view(mx.uint8))  # type: ignore[arg-type]
