"""`brigade verify`: its flags, and the lines or the object that it prints."""

import sys
from functools import partial

import typer

from coordinator.cli import flags
from coordinator.cli.parse import chosen_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.decoding.decode import Decode, make_decode


def verify(
    ctx: typer.Context,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    max_tokens: flags.MaxTokens = 32,
    seed: flags.VerifySeed = 0,
    decode: flags.DecodeKind = "ar",
    window: flags.Window = "auto",
    entropy_threshold: flags.EntropyThreshold = Decode.entropy_threshold,
    position_penalty: flags.PositionPenalty = Decode.position_penalty,
    stream: flags.Stream = False,
    as_json: flags.Json = False,
) -> int:
    """Prove that the cluster's tokens are those of mlx-lm's model in one process; exit code 1 if they are not.

    Where that does not fit here, of its layers one after another, read from this machine's disk.
    """
    options = chosen_cluster(ctx)
    decoder = make_decode(decode, window, entropy_threshold, position_penalty)

    from coordinator.cli.run import run_async

    return run_async(run_verify(options, decoder, max_tokens=max_tokens, seed=seed, stream=stream, as_json=as_json))


async def run_verify(
    options: ClusterOptions, decode: Decode, *, max_tokens: int, seed: int, stream: bool = False, as_json: bool
) -> int:
    """Print the comparison. The exit code: 0 if the cluster is the model, 1 if not.

    Into a pipe or a file each line goes as it is found; a terminal shows a bar meanwhile, and the lines at the end.
    """
    from coordinator.quality.verify import verify

    lines: list[str] = []
    tell = lines.append if as_json or sys.stdout.isatty() else partial(print, flush=True)
    report = await verify(options, decode, max_tokens=max_tokens, seed=seed, stream=stream, tell=tell)
    if as_json:
        print(report.to_json())
    else:
        print("\n".join([*lines, report.summary()]), flush=True)
    return 0 if report.holds else 1
