"""`brigade score`: how likely a text is to the model."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.doors.bars import show_tokens
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import open_resident
from coordinator.resident.scores import score_text, windows_of
from coordinator.sessions.answer import Scored
from worker.errors import InputError


async def run_score(options: ClusterOptions, text: str, *, as_json: bool) -> None:
    """Print the text's figures.

    Raises:
        InputError: it has fewer than two tokens. BrigadeError: the model cannot be loaded, or its cluster failed.
    """
    frontend = await Frontend.read(options.model, trust_remote_code=options.trust_remote_code)
    tokens = await frontend.prompt_ids(text)
    if len(tokens) < 2:
        raise InputError("", f"expected a text of at least two tokens, found {len(tokens)}: the first follows nothing")
    size = min(options.context, frontend.spec.context) - 1  # the context has a place for the token that is dropped
    if size < 2:
        raise InputError("context", f"expected at least 3 tokens, got {size + 1}")
    async with open_resident(frontend, options, size + 1, max_waiting=8, max_wait_s=600.0) as model:
        began = time.monotonic()
        with show_tokens("scored", len(tokens) - 1) as report:
            scores = await score_text(model, tokens, size, lambda count: report(count, count))
        took_s = time.monotonic() - began
    found = figures_of(scores)
    if as_json:
        print(json.dumps(found), flush=True)
        return
    print(f"perplexity {found['perplexity']:.4f}, log-probability {found['logprob']:.3f} of {found['tokens']} tokens")
    num_windows = len(windows_of(len(tokens), size))
    beside = f" in {num_windows} windows of {size} tokens" if num_windows > 1 else ""
    say(f"scored{beside} in {took_s:.1f} s, {len(scores) / took_s:.0f} tok/s")


def figures_of(scores: Sequence[Scored]) -> dict[str, Any]:
    """The object of `--json`: scored tokens, the sum of their log-probabilities, and e to the mean loss."""
    logprob = math.fsum(score.token.logprob for score in scores)
    loss = -logprob / len(scores)
    return {"tokens": len(scores), "logprob": logprob, "perplexity": math.exp(loss) if loss < 700 else None}
