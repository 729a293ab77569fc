"""Answers: what the answers of all shapes have in common. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.resident.channels import Delta
from coordinator.sessions.answer import Token, Usage
from coordinator.sessions.waterfall import make_waterfall

Json = dict[str, Any]
TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes | None]  # of a part of a character as well, where they are known
LEAST_LOGPROB = -9999.0  # as OpenAI's: JSON has no infinity


def usage_of(last: Delta) -> Usage:
    """What an answer took, by its last delta."""
    assert last.piece.usage is not None, "only the last piece of an answer tells what it took"
    return last.piece.usage


def total_usage(lasts: Sequence[Delta]) -> Json:
    """OpenAI's `usage` of all choices of one request, which share their prompt."""
    usages = [usage_of(last) for last in lasts]
    num_prompt, num_generated = usages[0].num_prompt, sum(usage.num_generated for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": min(usages[0].num_reused, num_prompt)},
    }


def summed_usage(usages: Sequence[Json]) -> Json:
    """OpenAI's `usage` of several prompts."""
    total = {name: sum(usage[name] for usage in usages) for name in usages[0] if name != "prompt_tokens_details"}
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def figures_of(last: Delta) -> Json:
    """Our own block: what windows, recoveries and prefixes made of it; where its time went, if it was traced."""
    usage = usage_of(last)
    waterfall = make_waterfall(usage.legs, usage.started, last.piece.at) if usage.legs else None
    return {
        "steps": usage.num_steps,
        "tokens_per_step": round(usage.num_generated / usage.num_steps, 2) if usage.num_steps else None,
        "recoveries": usage.num_recoveries,
        "recovery_s": round(usage.still_s, 3),
        "reused_tokens": usage.num_reused,
        "waterfall": {"wall_ms": waterfall.wall_ms, **waterfall.parts} if waterfall else None,
    }


def logprobs_of(token: Token, text_of: TokenText, bytes_of: TokenBytes) -> Json:
    """OpenAI's entry of one token, with its alternatives."""
    own = _entry(token.token, token.logprob, text_of, bytes_of)
    others = [_entry(other.token, other.logprob, text_of, bytes_of) for other in token.alternatives]
    return own | {"top_logprobs": others}


def _entry(token: int, logprob: float, text_of: TokenText, bytes_of: TokenBytes) -> Json:
    spelled = bytes_of(token)
    told = None if spelled is None else list(spelled)
    return {"token": text_of(token), "logprob": max(logprob, LEAST_LOGPROB), "bytes": told}
