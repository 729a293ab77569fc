"""`brigade score`: log-probabilities and perplexity of a text."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say, show_tokens
from coordinator.sessions.output import Scored
from worker.errors import InputError
from worker.platform.files import reading
from worker.platform.text import counted


def score(
    file: Annotated[
        str, typer.Argument(metavar="FILE", show_default=False, help="A UTF-8 text; `-` or none: standard input.")
    ] = "-",
    *,
    cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.TEXT)],
    as_json: flags.JsonFlag = False,
) -> Coroutine[Any, Any, None]:
    """Print how likely a text is to the model: the log-probability of its tokens, and its perplexity.

    The first token follows nothing and has no score. If the text has less than --context tokens, every other token is
    scored after all tokens before it. A longer text is scored in windows of --context tokens that overlap by half: only
    the second half of a window is scored, so that at least half of --context tokens come before each scored token.

    brigade score --model demo --local 2 README.md
    """
    return run_score(cluster.options(), _read(file), as_json=as_json)


def _read(file: str) -> str:
    """Raises InputError for a file that is missing or not UTF-8."""
    with reading("", file):
        if file == "-":
            return sys.stdin.buffer.read().decode()
        with open(file, encoding="utf-8", newline="") as stream:
            return stream.read()


async def run_score(options: ClusterOptions, text: str, *, as_json: bool) -> None:
    """Print the scores of a text.

    Raises:
        InputError: the text has fewer than two tokens. BrigadeError: the model cannot be loaded, or the cluster failed.
    """
    from coordinator.engine.engine import open_engine
    from coordinator.engine.inputs import InputProcessor
    from coordinator.engine.scores import score_text, windows_of

    inputs = await InputProcessor.read(options)
    tokens = await inputs.prompt_ids(text)
    if len(tokens) < 2:
        raise InputError("", f"expected a text of at least two tokens, found {len(tokens)}: the first follows nothing")
    size = min(options.context, inputs.spec.context) - 1  # one place is for the generated token, which is dropped
    if size < 2:
        raise InputError("context", f"expected at least 3 tokens, got {size + 1}")
    async with open_engine(inputs, replace(options, context=size + 1), max_waiting=8) as model:
        began = time.monotonic()
        with show_tokens("scored", len(tokens) - 1) as report:
            scores = await score_text(model, tokens, size, lambda count: report(count, count))
        took_s = time.monotonic() - began
    found = figures_of(scores)
    if as_json:
        flags.print_json(found)
        return
    perplexity = ": overflow" if found["perplexity"] is None else f" {found['perplexity']:.4f}"
    print(f"perplexity{perplexity}, log-probability {found['logprob']:.3f} of {counted(found['tokens'], 'token')}")
    num_windows = len(windows_of(len(tokens), size))
    windows = f" in {num_windows} windows of {size} tokens" if num_windows > 1 else ""
    say(f"scored{windows} in {took_s:.1f} s, {len(scores) / took_s:.0f} tok/s")


def figures_of(scores: Sequence[Scored]) -> dict[str, Any]:
    """Return the object of `--json`; the perplexity is e to the mean loss, null if that overflows."""
    logprob = math.fsum(score.token.logprob for score in scores)
    loss = -logprob / len(scores)
    return {"tokens": len(scores), "logprob": logprob, "perplexity": math.exp(loss) if loss < 700 else None}
