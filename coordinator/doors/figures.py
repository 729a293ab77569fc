"""Figures: what an answer took, as all doors tell it. Pure."""

from typing import Any

from coordinator.sessions.answer import Answer


def stats_of(answer: Answer) -> dict[str, Any]:
    """The `stats` object of a line. Speeds are null where there is nothing to divide by."""
    decoded, num_tokens, usage = answer.decode_s, len(answer.tokens), answer.usage
    return {
        "prompt_tokens": usage.num_prompt,
        "reused_tokens": usage.num_reused,
        "ttft_s": answer.ttft_s,
        "decode_s": decoded,
        "tokens_per_s": (num_tokens - 1) / decoded if decoded else None,
        "prompt_tokens_per_s": usage.num_prompt / answer.ttft_s,
        "steps": usage.num_steps,
        "tokens_per_step": num_tokens / usage.num_steps if usage.num_steps else None,
        "recoveries": usage.num_recoveries,
        "recovery_s": usage.still_s,
    }
