"""`brigade quantize`: makes a quantised copy of a model, which may be larger than this machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cluster.progress import say, show_bytes
from worker.platform.text import format_bytes

_panel = "Quantisation"


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="A folder, a hub repository, or `demo`.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", show_default=False, help="A new folder.")],
    *,
    q_mode: Annotated[
        str, typer.Option(metavar="affine|mxfp4|mxfp8|nvfp4", help="The format.", rich_help_panel=_panel)
    ] = "affine",
    q_bits: Annotated[
        int | None,
        typer.Option(help="affine: bits per weight: 2, 3, 4, 5, 6 or 8. (default: 4)", rich_help_panel=_panel),
    ] = None,
    q_group_size: Annotated[
        int | None,
        typer.Option(help="affine: weights that share a scale: 32, 64 or 128. (default: 64)", rich_help_panel=_panel),
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Modules that are not quantised, as lm_head,embed_tokens.")
    ] = None,
) -> None:
    """Quantise a model, tensor by tensor from disk: only one tensor at a time is in memory.

    The tensors are those of mlx_lm's convert, and mlx_lm loads the result. Run again, the command continues where it
    was interrupted.

    brigade quantize Qwen/Qwen3-8B qwen3-8b-4bit --q-bits 4 --keep lm_head,embed_tokens
    """
    from coordinator.quality.quantize import QuantizedModel, quantize_options, write_model
    from worker.node.loading import open_checkpoint

    kept = [name.strip() for name in (keep or "").split(",") if name.strip()]
    options = quantize_options(q_mode, q_bits, q_group_size, kept)
    checkpoint = open_checkpoint(model)
    if lacking := checkpoint.lacking(checkpoint.tensors):
        say(f"downloading {len(lacking)} files of {checkpoint.name} ...")
        checkpoint.fetch(checkpoint.tensors, lambda nbytes: None)
    found = QuantizedModel(checkpoint, options)
    state = {
        "model": checkpoint.fingerprint.tensors,
        "config": checkpoint.fingerprint.config,
        "files": [list(pair) for pair in checkpoint.stamp()],
        "options": [options.mode, options.bits, options.group_size, list(options.keep)],
    }
    with show_bytes("quantised", found.nbytes) as report:
        write_model(found, checkpoint, out, state, report)
    say(f"{out}: {format_bytes(found.nbytes)}, {found.bits_per_weight:.2f} bits per weight")
