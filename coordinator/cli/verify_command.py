"""`brigade verify`: its flags, and what they amount to."""

import typer

from coordinator.cli import flags
from coordinator.cli.chosen import chosen_cluster
from coordinator.cli.refusals import refuse_idle
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
    refuse_idle(ctx)

    from coordinator.cli.commands import run_verify
    from coordinator.cli.run_async import run_async

    return run_async(run_verify(options, decoder, max_tokens=max_tokens, seed=seed, stream=stream, as_json=as_json))
