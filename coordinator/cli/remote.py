"""`brigade generate --server`: one request to a server that runs; its text as it comes, and what it took."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.cli.wish import Wish
from coordinator.cluster.progress import say
from coordinator.doors.server import open_server
from coordinator.doors.show import Show, showing
from coordinator.doors.speakers import Figures, Said, ServerSpeaker
from coordinator.http.keys import first_key
from coordinator.resident.ask import require_utf8
from worker.errors import InputError


async def run_remote(url: str, key_file: Path | None, body: dict[str, Any], wish: Wish) -> None:
    """Raises InputError if the request is wrong. ServerFailed: there is no server, or it did not answer."""
    for name, text in (("prompt", wish.prompt), ("system_prompt", wish.system)):
        require_utf8(name, text or "")
    async with open_server(url, first_key(key_file) if key_file else None) as server:
        began = time.monotonic()
        with nullcontext(None) if wish.as_json else showing(None) as show:
            said, first = await _gathered(_steps(ServerSpeaker(server, body), wish), show)
        ended = time.monotonic()
    assert said.figures is not None
    found = _as_json(said, said.figures, (first or ended) - began, ended - (first or ended))
    if wish.as_json:
        print(json.dumps(found), flush=True)
        return
    stats = found["stats"]
    speed = f", {stats['tokens_per_s']:.1f} tok/s" if stats["tokens_per_s"] else ""
    say(f"{said.figures.num_generated} tokens{speed}; first after {stats['ttft_s']:.3f} s, by {server.name} at {url}")


def _steps(speaker: ServerSpeaker, wish: Wish) -> AsyncGenerator[Said, None]:
    if wish.prompt_tokens is not None:
        return speaker.complete(wish.prompt_tokens)
    assert wish.prompt is not None
    if not (wish.prompt if wish.raw else wish.prompt.strip()):
        raise InputError("prompt", "expected some text, found none")
    if wish.raw:
        return speaker.complete(wish.prompt)
    system = [{"role": "system", "content": wish.system}] if wish.system else []
    return speaker.stream([*system, {"role": "user", "content": wish.prompt}])


async def _gathered(steps: AsyncGenerator[Said, None], show: Show | None) -> tuple[Said, float | None]:
    """All steps as one, shown as they come, and when the first text came."""
    whole, first = Said(), None
    async with aclosing(steps):
        async for step in steps:
            if first is None and (step.text or step.reasoning):
                first = time.monotonic()
            if show is not None:
                show.say(step.text)
            reason, figures = step.finish_reason or whole.finish_reason, step.figures or whole.figures
            whole = replace(step, text=whole.text + step.text, finish_reason=reason, figures=figures)
    return whole, first


def _as_json(said: Said, figures: Figures, ttft_s: float, decode_s: float) -> dict[str, Any]:
    """The object of `--json`. A server tells no token ids, and nothing of its stages."""
    num_tokens = figures.num_generated
    stats = {
        "ttft_s": ttft_s,
        "decode_s": decode_s,
        "tokens_per_s": (num_tokens - 1) / decode_s if decode_s and num_tokens > 1 else None,
        "prompt_tokens_per_s": figures.num_prompt / ttft_s if ttft_s else None,
        "num_tokens": num_tokens,
        "reused_tokens": figures.num_reused,
        "recoveries": figures.num_recoveries,
    }
    return {
        "text": said.text, "tokens": None, "prompt_tokens": figures.num_prompt, "finish_reason": said.finish_reason,
        "logprobs": None, "stats": stats, "stages": [],
    }  # fmt: skip
