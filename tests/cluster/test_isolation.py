"""Requests for endless work, many at once, change no token of four streams beside them, and leave nothing."""

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import psutil
import pytest

from tests.cluster.models import make_talker
from tests.cluster.processes import Starter
from tests.cluster.servers import start_server
from tests.tiny import change_json

HI = [{"role": "user", "content": "hi"}]
PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*x.{{{n}}}$"} for n in range(12, 60)]}
LARK = "start: A\nA: " + " & ".join(f"/.*x.{{{n}}}/" for n in range(12, 60))
SELF = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"allOf": [{"$ref": "#/$defs/a"}]}]}}, "$ref": "#/$defs/a"}
MANY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 50_000
LOOP = (
    "{% if loop_for_ever %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
NUM_STREAMS, NUM_TOKENS = 3, 80
MOST_SLOWER = 8  # times: processes that are bounded take their share of two cores
MOST_GROWN = 200e6  # bytes, of which allocators keep some


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": HI, "max_tokens": 2, **more}


def schema(value: Any) -> tuple[str, dict[str, Any]]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


HOSTILE = {
    "patterns": schema(PATTERNS),
    "lark": chat(response_format={"type": "grammar", "grammar": LARK}),
    "self": schema(SELF),
    "values": schema({"enum": [f"value {n}" for n in range(100_000)]}),
    "template": chat(chat_template_kwargs={"loop_for_ever": True}),
    "long": ("/v1/completions", {"prompt": "a b c d " * 1_040_000}),
    "count": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a b c d " * 1_040_000}]}),
    "messages": chat(messages=MANY),
    "items": ("/v1/responses", {"input": MANY}),
}


async def stream(client: httpx2.AsyncClient, seed: int) -> tuple[str, list[float]]:
    """The text of an answer, and when its parts came."""
    body = {"prompt": "the quick brown fox", "max_tokens": NUM_TOKENS, "seed": seed, "temperature": 1.0}
    text, times = "", []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                times.append(time.monotonic())
    return text, times


async def streams(client: httpx2.AsyncClient) -> tuple[list[str], float]:
    """The texts of several answers at once, and the median gap between their parts, seconds."""
    found = await asyncio.gather(*(stream(client, seed) for seed in range(NUM_STREAMS)))
    gaps = [later - earlier for _, times in found for earlier, later in pairwise(times)]
    return [text for text, _ in found], median(gaps)


async def attacked(client: httpx2.AsyncClient, path: str, content: bytes) -> int:
    headers = {"Content-Type": "application/json"}
    return (await client.post(path, content=content, headers=headers)).status_code


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "num_hostile"),
    [(("template", "messages"), 6), pytest.param(tuple(HOSTILE), 20, marks=pytest.mark.matrix)],
    ids=["two", "all"],
)
async def test_no_request_changes_the_streams_beside_it(
    start: Starter, tmp_path: Path, names: tuple[str, ...], num_hostile: int
) -> None:
    folder = make_talker(tmp_path / "model")
    change_json(folder / "tokenizer_config.json", chat_template=LOOP)
    server = start_server(start, folder, "--local", "1")
    process = psutil.Process(server.running.process.pid)
    limits = httpx2.Limits(max_connections=100)
    async with httpx2.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        for name in names:
            where, body = HOSTILE[name]
            await client.post(where, json=body)  # its processes are there before anything is compared
        alone, gap_alone = await streams(client)
        before = process.memory_info().rss
        for name in names:
            where, body = HOSTILE[name]
            content = json.dumps(body).encode()
            running = asyncio.create_task(streams(client))
            hits = [asyncio.create_task(attacked(client, where, content)) for _ in range(num_hostile)]
            texts, gap = await running
            assert texts == alone, name
            assert gap < MOST_SLOWER * gap_alone, (name, gap, gap_alone)
            if name in ("patterns", "lark"):  # each takes its whole time, one after another
                for hit in hits:
                    hit.cancel()
            codes = await asyncio.gather(*hits, return_exceptions=True)
            assert {code for code in codes if isinstance(code, int)} <= {400, 413}, (name, codes)
        assert await streams(client) == (alone, pytest.approx(gap_alone, rel=MOST_SLOWER))
        assert process.memory_info().rss < before + MOST_GROWN
