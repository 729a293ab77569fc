"""`brigade quantize`: makes a quantised copy of a model, which may be larger than this machine's memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cluster.progress import say, show_bytes, show_tokens
from coordinator.cluster.tables import fitting, plain_console
from worker.platform.text import Json, counted, format_bytes
from worker.platform.threads import run_in_thread

if TYPE_CHECKING:
    from coordinator.quality.quantize import QuantizeOptions
    from worker.model.checkpoint import Checkpoint

_format = partial(typer.Option, rich_help_panel="Quantisation")
_mixed = partial(typer.Option, rich_help_panel="Mixed bits")


async def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="A folder, a hub repository, or `demo`.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="A new folder.")],
    *,
    q_mode: Annotated[str, _format(metavar="affine|mxfp4|mxfp8|nvfp4", help="The format.")] = "affine",
    q_bits: Annotated[int | None, _format(help="affine: bits per weight: 2, 3, 4, 5, 6 or 8. (default: 4)")] = None,
    q_group_size: Annotated[
        int | None, _format(help="affine: weights that share a scale: 32, 64 or 128. (default: 64)")
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Modules that are not quantised, such as embed_tokens,lm_head."),
    ] = None,
    recipe: Annotated[
        str | None,
        _mixed(
            metavar="sensitivity",
            help="affine: give 8 bits to the parts that suffer most from --q-bits, as far as --target-bpw allows.",
        ),
    ] = None,
    target_bpw: Annotated[
        float | None,
        _mixed(min=1, help="Bits per weight on average: at most with --recipe, about with --method dynamic."),
    ] = None,
    calibration: Annotated[
        Path | None, _mixed(metavar="FILE", help="The text that --recipe and --method look at. (default: a small one)")
    ] = None,
    method: Annotated[
        str | None,
        _format(
            metavar="awq|gptq|dynamic", help="affine: quantise by mlx_lm's method of this name, which looks at a text."
        ),
    ] = None,
    as_json: flags.JsonFlag = False,
) -> None:
    """Quantise a model, tensor by tensor from disk: only one tensor at a time is in memory.

    The tensors are those of mlx_lm's convert, and mlx_lm loads the result. Run again, the command continues where it
    was interrupted.

    --recipe sensitivity holds the whole model in memory: it quantises each part alone, a kind of module in a quarter of
    the layers, and measures the loss on a text and, if the model was trained for windows, how many drafts hold. An
    interrupted measurement begins anew.

    --method holds the model in memory, too: awq scales and clips each layer's weights by their inputs, gptq corrects
    what it rounds, dynamic gives 8 bits to modules by their gradients, to about --target-bpw. A longer text in
    --calibration helps. A run that is interrupted begins anew.

    brigade quantize Qwen/Qwen3-8B qwen3-8b-4bit --q-bits 4 --keep lm_head,embed_tokens

    brigade quantize demo mixed --recipe sensitivity --target-bpw 5.5

    brigade quantize Qwen/Qwen3-8B qwen3-8b-awq --method awq --calibration texts.txt
    """

    def run() -> _Written:
        from coordinator.quality.quantize import quantize_options, require_new_or_unfinished

        kept = [name.strip() for name in (keep or "").split(",") if name.strip()]
        options = quantize_options(q_mode, q_bits, q_group_size, kept)
        require_new_or_unfinished(out)
        conversion = _Conversion(model, out, options, recipe, target_bpw, calibration)
        return conversion.write_rounded() if method is None else conversion.write_by_method(method)

    _tell(out, await run_in_thread(run), as_json=as_json)  # interrupts take effect while MLX computes


@dataclass(frozen=True)
class _Written:
    """A quantised copy on disk; `parts` have the bits that a recipe chose."""

    nbytes: int
    bits_per_weight: float
    parts: list[Json] = field(default_factory=list)


@dataclass(frozen=True)
class _Conversion:
    """What is to be quantised, and what the flags say of it."""

    model: str
    out: Path
    options: QuantizeOptions
    recipe: str | None
    target_bpw: float | None
    calibration: Path | None

    def write_by_method(self, method: str) -> _Written:
        """Quantise by a method of mlx_lm."""
        from coordinator.quality.methods import MethodRun, require_method
        from coordinator.quality.quantize import opened
        from coordinator.quality.sensitivity import read_text
        from worker.node.loading import open_checkpoint

        require_method(method, self.options, self.recipe, self.target_bpw)
        text = read_text(self.calibration)
        checkpoint = open_checkpoint(self.model)
        converting = MethodRun(checkpoint, method, self.options, self.target_bpw, text)
        _fetch(checkpoint)
        state = {**_state(checkpoint, self.options), "method": [method, self.target_bpw, _hash(text)]}
        with opened(self.out, state):
            return _Written(*converting.write(self.out))

    def write_rounded(self) -> _Written:
        """Round the weights, tensor by tensor, to bits that a recipe may choose for each part."""
        from coordinator.quality.quantize import QuantizedModel, begun_parts, require_new, write_model
        from coordinator.quality.sensitivity import read_text, require_recipe
        from worker.node.loading import open_checkpoint

        options = self.options
        require_recipe(self.recipe, options, self.target_bpw, self.calibration)
        text = read_text(self.calibration) if self.recipe else ""
        checkpoint = open_checkpoint(self.model)
        _fetch(checkpoint)
        state, parts = _state(checkpoint, options), list[Json]()
        if self.target_bpw is not None:
            state["recipe"] = [self.target_bpw, _hash(text)]
            parts = begun_parts(self.out, state)
            if not parts:
                require_new(self.out)
                QuantizedModel(checkpoint, options)  # what it refuses, it refuses before the model is measured
                parts = _measured_parts(checkpoint, options, text, self.target_bpw)
            state["parts"] = parts
            options = replace(options, bits_of={path: part["bits"] for part in parts for path in part["modules"]})
        found = QuantizedModel(checkpoint, options)
        with show_bytes("quantised", found.nbytes) as report:
            write_model(found, checkpoint, self.out, state, report)
        return _Written(found.nbytes, found.bits_per_weight, parts)


def _state(checkpoint: Checkpoint, options: QuantizeOptions) -> dict[str, Any]:
    """Return the identity of a conversion."""
    return {
        "model": checkpoint.fingerprint.tensors,
        "config": checkpoint.fingerprint.config,
        "files": [list(pair) for pair in checkpoint.require_unchanged()],
        "options": [options.mode, options.bits, options.group_size, list(options.keep)],
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tell(out: Path, found: _Written, *, as_json: bool) -> None:
    if as_json:
        flags.print_json({"bytes": found.nbytes, "bits_per_weight": found.bits_per_weight, "parts": found.parts})
    elif found.parts:
        rows = []
        for part in found.parts:
            lost = "not measured" if part["drafts_lost"] is None else f"{part['drafts_lost']:+.3f}"
            rows.append([part["part"], f"{part['weights']:,}", f"{part['loss']:+.4f}", lost, str(part["bits"])])
        console = plain_console()
        console.print(fitting(("part", "weights", "loss, nats", "drafts lost", "bits"), rows, console.width))
    say(f"{out}: {format_bytes(found.nbytes)}, {found.bits_per_weight:.2f} bits per weight")


def _fetch(checkpoint: Checkpoint) -> None:
    if lacking := checkpoint.lacking(checkpoint.tensors):
        say(f"downloading {counted(len(lacking), 'file')} of {checkpoint.name} ...")
        checkpoint.fetch(checkpoint.tensors, lambda nbytes: None)


def _measured_parts(checkpoint: Checkpoint, options: QuantizeOptions, text: str, target: float) -> list[Json]:
    """Return the parts of the model, with what each suffers and the bits that are chosen for it."""
    from coordinator.quality.sensitivity import HIGH_BITS, Ablation

    ablation = Ablation(checkpoint, options, text)
    with show_tokens("measured", len(ablation.groups)) as report:
        found = ablation.run(target, report)
    high = ablation.choose(found, target)
    return [
        {
            "part": each.group.name, "modules": list(each.group.paths), "weights": each.group.num_weights,
            "bits": HIGH_BITS if each in high else options.bits, "loss": each.loss, "drafts_lost": each.drafts,
        }
        for each in sorted(found, key=lambda each: -each.loss)
    ]  # fmt: skip
