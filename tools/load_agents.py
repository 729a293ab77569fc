"""Agents at once against a server whose workers are killed: long shared instructions, tools, turns, the same answers.

python -m tools.load_agents [--agents 64] [--turns 5] [--instructions 20000] [--kills 2]

A tiny random model with a tool template. Each agent first has its conversation alone: it asks, must call a tool, sends
the result, and goes on. Then all have theirs at once, while workers are killed: every stream has to be whole and to say
what it said alone, what was fed for another turn or agent has to be reused, and the server's memory must not grow from
the second half of the turns on. Exits with 1 where any of this does not hold.
"""

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer
import uvloop

from tools import random_model
from tools.load_serve import disturbed
from tools.serve_client import brigade, events, long_text, print_failures
from worker.platform.run import run_command

_MOST_GROWTH = 1.2  # of the server's memory between the half and the end
_MOST_FED = 500  # prompt tokens per turn that nothing was reused for
_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


@dataclass
class Said:
    """What an agent was answered: one entry per turn."""

    turns: list[tuple[str, str, str]] = field(default_factory=list)  # text, calls, finish reason
    num_prompt: int = 0  # tokens of all turns
    num_reused: int = 0  # of these


def main(
    agents: Annotated[int, typer.Option(min=1, help="At once.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Of each agent.")] = 5,
    instructions: Annotated[int, typer.Option(min=16, help="Tokens of the system prompt, about.")] = 20_000,
    kills: Annotated[int, typer.Option(min=0)] = 2,
    local: Annotated[int, typer.Option(min=1, help="Workers.")] = 1,
) -> int:
    """Have many agents at work until one is answered otherwise than alone."""
    return print_failures(uvloop.run(_check(agents, turns, instructions, kills, local)))


async def _check(agents: int, turns: int, instructions: int, kills: int, local: int) -> list[str]:
    system = {"role": "system", "content": long_text(instructions)}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        context = 2 * instructions + 400 * turns
        random_model.main(model, hidden=64, layers=2, context=context, dtype="float32", chats=True)
        with brigade("--model", model, "--local", str(local), "--rejoin-timeout", "50") as server:
            async with server.client() as client:
                began = time.monotonic()
                alone = [await _converse(client, system, number, turns) for number in range(agents)]
                alone_s = time.monotonic() - began
                began = time.monotonic()
                all_at_once = asyncio.gather(*(_converse(client, system, n, turns) for n in range(agents)))
                together, memory = await disturbed(server, all_at_once, kills, alone_s / (kills + 1) / 2)
                took_s = time.monotonic() - began
    failures = [
        f"agent {number}, turn {turn}: {found!r} instead of {expected!r}"
        for number, (one, other) in enumerate(zip(together, alone, strict=True))
        for turn, (found, expected) in enumerate(zip(one.turns, other.turns, strict=True))
        if found != expected
    ]
    num_prompt, num_reused = sum(said.num_prompt for said in together), sum(said.num_reused for said in together)
    num_fed = (num_prompt - num_reused) // (agents * turns)
    half, end = max(memory[: len(memory) // 2 + 1]), memory[-1]
    print(
        f"{agents} agents, {turns} turns, {num_prompt // (agents * turns)} prompt tokens each: alone {alone_s:.0f} s, "
        f"together {took_s:.0f} s, {kills} kills, {len(failures)} answers differ, all but {num_fed} tokens of "
        f"each prompt reused, memory {half >> 20} to {end >> 20} MiB"
    )
    if num_fed > _MOST_FED:
        failures.append(f"expected at most {_MOST_FED} tokens fed per prompt, found {num_fed}")
    if end > _MOST_GROWTH * half:
        failures.append(f"memory grew from {half} to {end} bytes")
    return failures


async def _converse(client: httpx2.AsyncClient, system: dict[str, Any], number: int, turns: int) -> Said:
    """Have one agent's conversation: calls that are forced and answers take turns."""
    messages, said = [system, {"role": "user", "content": f"Task {number}: read file {7 * number}."}], Said()
    for turn in range(turns):
        body = {
            "messages": messages,
            "tools": [_TOOL],
            "tool_choice": "none" if turn % 2 else "required",
            "max_tokens": 64,
            "temperature": 0.8,
            "seed": 100 * number + turn,
        }
        message, reason = await _turn(client, body, said)
        said.turns.append((message["content"], json.dumps([c["function"] for c in message["tool_calls"]]), reason))
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"line {turn} of file {number}"}
            for call in message["tool_calls"]
        ]
        if not message["tool_calls"]:
            del message["tool_calls"]
        messages = [*messages, message, *(results or [{"role": "user", "content": f"Go on with step {turn}."}])]
    return said


async def _turn(client: httpx2.AsyncClient, body: dict[str, Any], said: Said) -> tuple[dict[str, Any], str]:
    """Read one streamed answer; return its message and finish reason."""
    text, reason, is_whole = "", "", False
    calls: list[dict[str, Any]] = []
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"expected status 200, found {answer.status_code}: {(await answer.aread())[:200]!r}")
        async for told in events(answer):
            is_whole = told is None
            if told is None:
                break
            for choice in told.get("choices", ()):
                delta, reason = choice["delta"], choice.get("finish_reason") or reason
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(calls):
                        calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                    for name, more in call["function"].items():
                        calls[call["index"]]["function"][name] += more or ""
            if usage := told.get("usage"):
                said.num_prompt += usage["prompt_tokens"]
                said.num_reused += usage["prompt_tokens_details"]["cached_tokens"]
    if not is_whole:
        raise RuntimeError("expected a whole stream, found one without its end")
    return {"role": "assistant", "content": text, "tool_calls": calls}, reason


if __name__ == "__main__":
    run_command(main)
