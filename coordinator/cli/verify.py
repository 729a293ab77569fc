"""`brigade verify`: compares the cluster with the model in one process."""

import sys
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions
from coordinator.decoding.decode_options import Decode
from worker.config import NO_DRAFTER


def verify(
    ctx: typer.Context,
    *,
    cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.TEXT)],
    max_tokens: flags.MaxTokens = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Of the prompts and the samples.")] = 0,
    windows: Annotated[flags.DecodeFlags, TakeFlags(decode="ar")],
    stream: Annotated[
        bool, typer.Option("--stream", help="Read the reference layer by layer even if the whole model fits here.")
    ] = False,
    as_json: flags.JsonFlag = False,
) -> Coroutine[Any, Any, int]:
    """Prove that the cluster's tokens are those of mlx-lm's model in one process; exit code 1 if they are not.

    If the whole model does not fit in this machine's memory, the reference reads one layer at a time from disk. With a
    draft model the decoder is `draft`, unless --decode says otherwise. `diffusion-fast`, which mlx-lm does not have, is
    compared with itself in one process.
    """
    options = cluster.options()
    if options.draft_model not in (None, NO_DRAFTER) and "decode" not in flags.given_flags(ctx):
        windows = replace(windows, decode="draft")
    decode = windows.decoder()
    flags.refuse_drafter(ctx, [decode.kind])
    return run_verify(options, decode, max_tokens=max_tokens, seed=seed, stream=stream, as_json=as_json)


async def run_verify(
    options: ClusterOptions, decode: Decode, *, max_tokens: int, seed: int, stream: bool = False, as_json: bool
) -> int:
    """Print the comparison and return the exit code: 0 if the cluster is the model, 1 if not.

    A pipe or a file gets each line at once; a terminal shows a progress bar first, and all lines at the end.
    """
    from coordinator.quality.verify import verify

    lines: list[str] = []
    tell = lines.append if as_json or sys.stdout.isatty() else partial(print, flush=True)
    report = await verify(options, decode, max_tokens=max_tokens, seed=seed, stream=stream, tell=tell)
    if as_json:
        flags.print_json(report.as_json())
    else:
        print("\n".join([*lines, report.summary()]), flush=True)
    return 0 if report.holds else 1
