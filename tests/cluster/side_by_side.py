"""Many requests at once on running workers: python -m tests.cluster.side_by_side SCENARIO CLUSTER_YAML; prints JSON."""

import asyncio
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode import Decode
from coordinator.engine.engine import Engine, generate_once
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling

CHUNK = 128
LONG = 9 * CHUNK
CONTEXT = 16_384
DECODES = (Decode(), Decode("ngram"), Decode("diffusion", 8), Decode("diffusion-fast", 8, 1.0), Decode("diffusion", 16))


def tokens_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(3 + (7 * i + i * i * (1 + seed % 5) + 11 * seed) % 311 for i in range(length))


async def mixed(chain: Chain) -> dict[str, Any]:
    """16 requests, each alone and then all at once."""
    requests = [
        Request(
            tokens_of(1 + (37 * i) % 120, i),
            8 + (5 * i) % 23,
            Sampling(seed=i, temperature=(0.0, 1.0, 0.7)[i % 3], top_p=0.9 if i % 4 else 0.0),
            DECODES[i % len(DECODES)],
        )
        for i in range(16)
    ]
    alone = [await generate_once(chain, request, chunk=32) for request in requests]
    async with Engine(chain) as engine:
        together = await asyncio.gather(*(engine.answer(request, chunk=32) for request in requests))
    return {
        "alone": [answer.tokens for answer in alone],
        "together": [answer.tokens for answer in together],
        "overlapped": max(a.usage.started for a in together) < min(a.token_times[-1] for a in together),
    }


async def long_prompt(chain: Chain) -> dict[str, Any]:
    """Streams that are joined by a prompt of many chunks: how many come back between two tokens of a stream."""
    async with Engine(chain) as engine:
        streaming = asyncio.Event()
        token_times: list[list[int]] = [[], [], []]

        async def read(number: int) -> None:
            async for piece in engine.generate(Request(tokens_of(5, number), 4000), chunk=CHUNK):
                token_times[number] += [piece.at] * len(piece.tokens)
                if sum(map(len, token_times)) >= 30:
                    streaming.set()

        streams = [asyncio.create_task(read(number)) for number in range(len(token_times))]
        await streaming.wait()
        prompt = await engine.answer(Request(tokens_of(LONG, 7), 4), chunk=CHUNK, traced=True)
        first = prompt.token_times[0]
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
    gaps = [gap for times in token_times for gap in pairwise(times)]
    chunks = [passage for passage in prompt.passages if passage.num_rows >= CHUNK]
    return {
        "num_chunks": len(chunks),
        "chunks_between": [sum(before < chunk.returned < after for chunk in chunks) for before, after in gaps],
        "tokens_meanwhile": sum(before < first and after > prompt.usage.started for before, after in gaps),
    }


SCENARIOS: dict[str, Callable[[Chain], Any]] = {"mixed": mixed, "long prompt": long_prompt}


async def main(scenario: str, config: Path) -> None:
    options = cluster_options(config, None, None, None, CONTEXT)
    checkpoint, spec = await read_model(options.model)
    async with open_chain(options, checkpoint, spec, CONTEXT) as chain:
        print(json.dumps(await SCENARIOS[scenario](chain)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
