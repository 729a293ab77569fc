"""What caches in 8 bits cost in quality: held-out text by the bundled model, with full and with int8 caches.

python -m tools.eval_kv --json docs/kv.json

Of every kind of text the answers in some conversations are scored, each by all that stands before it, and some
questions are answered, greedily and one token at a time. Everything in one process.
"""

import json
import math
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import make_cache_choice
from coordinator.engine.engine import generate_once
from coordinator.engine.tokenizer import Tokenizer
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request, check_request, eos_ids, make_sampling
from protos.brigade_pb2 import Cache
from tools.demo_data import mix
from tools.demo_data.turn import Turn
from tools.eval_windows import is_right
from worker.platform.machine import machine_name
from worker.platform.run import run_command

CACHES = ("full", "int8")
_TURNS = 6  # of a conversation: up to 1,300 tokens
_MOST = 400  # tokens of an answer


@dataclass
class Quality:
    """What one kind of text came to with one kind of cache."""

    kind: str
    kv: str
    num_scored: int = 0
    logprob: float = 0.0
    num_answers: int = 0
    num_right: int = 0
    num_equal: int = 0  # to the tokens with full caches

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprob / self.num_scored)


class Asker:
    """The model in one process, asked with any cache."""

    def __init__(self, chain: Chain, tokenizer: Tokenizer, eos: frozenset[int]) -> None:
        self._chain = chain
        self._tokenizer = tokenizer
        self._eos = eos

    async def score(self, turns: Sequence[Turn], cache: Cache) -> list[float]:
        """The log-probability of each token of the conversation's answers."""
        messages: list[dict[str, str]] = []
        ids: tuple[int, ...] = ()
        places: list[range] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn.prompt})
            asked = tuple(self._tokenizer.encode_chat(messages))
            ids = asked + tuple(self._tokenizer.encode(turn.answer, special=False))
            places.append(range(len(asked), len(ids)))
            messages.append({"role": "assistant", "content": turn.answer})
        sampling = make_sampling(seed=0, logprobs=1)
        answer = await self._run(Request(ids, 1, sampling, cache=cache, score_from=1))
        return [answer.scores[at - 1].token.logprob for place in places for at in place]

    async def answer(self, turn: Turn, cache: Cache) -> tuple[list[int], bool]:
        """Its tokens, and whether it is right."""
        ids = tuple(self._tokenizer.encode_chat([{"role": "user", "content": turn.prompt}]))
        found = await self._run(Request(ids, _MOST, cache=cache, eos=self._eos))
        words = [token for token in found.tokens if token not in self._eos]
        return found.tokens, is_right(turn, self._tokenizer.decode(words), found.finish_reason == "stop")

    async def _run(self, request: Request) -> Answer:
        check_request(request, self._chain.spec)
        return await generate_once(self._chain, request)


@asynccontextmanager
async def open_asker(model: str) -> AsyncIterator[Asker]:
    options = cluster_options(None, model, 0, None, None)
    checkpoint, spec = await read_model(options.model)
    tokenizer = Tokenizer(checkpoint)
    eos = frozenset(eos_ids(checkpoint.config, checkpoint.generation_config) | tokenizer.eos)
    async with open_chain(options, checkpoint, spec, spec.context) as chain:
        yield Asker(chain, tokenizer, eos)


async def measure(model: str, conversations: int, questions: int) -> list[Quality]:
    """A row per kind of text and cache."""
    found: list[Quality] = []
    async with open_asker(model) as asker:
        for kind in mix.MEASURED:
            turns = mix.held_out(kind, max(questions, 2 * _TURNS))
            talks = [random.Random(number).sample(turns, _TURNS) for number in range(conversations)]
            rows = {kv: Quality(kind, kv) for kv in CACHES}
            for talk in talks:
                for kv, row in rows.items():
                    scores = await asker.score(talk, make_cache_choice(kv, None))
                    row.num_scored += len(scores)
                    row.logprob += math.fsum(scores)
            for turn in turns[:questions]:
                usual: list[int] = []
                for kv, row in rows.items():
                    tokens, right = await asker.answer(turn, make_cache_choice(kv, None))
                    usual = usual or tokens
                    row.num_answers += 1
                    row.num_right += right
                    row.num_equal += tokens == usual
            found += rows.values()
            print(kind, file=sys.stderr, flush=True)
    return found


def table(rows: Sequence[Quality]) -> str:
    """As Markdown."""
    lines = ["| text | KV cache | perplexity | right answers | equal to full |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [
        f"| {row.kind} | {row.kv} | {row.perplexity:.4f} | {row.num_right} of {row.num_answers} | {row.num_equal} |"
        for row in rows
    ]
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`; the text suits `demo`.")] = "demo",
    conversations: Annotated[int, typer.Option(min=1, help="Of each kind, to be scored.")] = 3,
    questions: Annotated[int, typer.Option(min=1, help="Of each kind, to be answered.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
) -> None:
    """Perplexity and right answers of held-out text with full and with int8 caches."""
    rows = uvloop.run(measure(model, conversations, questions))
    print(f"{model} on {machine_name()}\n\n{table(rows)}")
    if json_file is not None:
        found = {"machine": machine_name(), "model": model, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
