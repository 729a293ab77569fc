"""What kinds of KV cache cost in quality and save in bytes, by the length of the context.

python -m tools.eval_kv --json docs/kv.json

Conversations of the bundled model's held-out text fill the context: of each, the answers of the second half are scored,
and the question at its end is answered, greedily and one token at a time. Bytes and tokens per second come from a model
of random weights. Everything in one process.
"""

import math
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from coordinator.cli.flags import parse_counts
from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import make_cache_choice
from coordinator.engine.engine import generate_once
from coordinator.engine.tokenizer import Tokenizer
from coordinator.sessions.request import Request, check_request, eos_ids, make_sampling
from protos.brigade_pb2 import Cache
from tools import random_model
from tools.demo_data import mix
from tools.demo_data.turn import Turn
from tools.eval_windows import is_right
from tools.figures import save, table
from worker.errors import InputError
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.text import format_bytes

CACHES = {
    "full": make_cache_choice("full"),
    "int8": make_cache_choice("int8"),
    "int4": make_cache_choice("int4"),
    "rotating, 256, keeping 4": make_cache_choice("rotating", 256, 4),
    "rotating, 256, keeping 0": make_cache_choice("rotating", 256, 0),
}
_MOST = 280  # tokens of a question and its answer
_CONTEXT = 2048  # of the bundled model
_DECODED = 17  # tokens, whose speed is that after the first one


@dataclass
class Quality:
    """What one kind of cache came to at one length."""

    length: int  # tokens of the prompts, at most
    kv: str
    num_scored: int = 0
    logprob: float = 0.0
    num_answers: int = 0
    num_right: int = 0
    num_equal: int = 0  # to the tokens with full caches

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprob / self.num_scored)


@dataclass(frozen=True)
class Speed:
    """What one kind of cache of a random model takes at one length."""

    length: int
    kv: str
    nbytes: int
    tokens_per_s: float


@dataclass
class Measured:
    """A whole run."""

    machine: str
    quality: list[Quality] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)


@dataclass(frozen=True)
class Talk:
    """A conversation that ends with a question."""

    ids: tuple[int, ...]
    scored: tuple[int, ...]  # places of the tokens of its later answers
    asked: Turn


class Asker:
    """The model in one process, asked with any cache."""

    def __init__(self, chain: Chain, tokenizer: Tokenizer, eos: frozenset[int]) -> None:
        self._chain = chain
        self._tokenizer = tokenizer
        self._eos = eos

    def talk(self, turns: Sequence[Turn], asked: Turn, length: int) -> Talk:
        """Return a conversation of those of the turns that fit into `length` tokens, with an answer, and a question."""
        messages: list[dict[str, str]] = []
        answers: list[range] = []
        for turn in (*turns, asked):
            question = {"role": "user", "content": turn.prompt}
            ids = tuple(self._tokenizer.encode_chat([*messages, question]))
            answer = self._tokenizer.encode(turn.answer, special=False)
            if turn is not asked and len(ids) + len(answer) + _MOST <= length:
                answers.append(range(len(ids), len(ids) + len(answer)))
                messages += [question, {"role": "assistant", "content": turn.answer}]
        if not (later := answers[len(answers) // 2 :]):
            raise InputError("lengths", f"expected room for a question, its answer and {_MOST} tokens, got {length}")
        return Talk(ids, tuple(place for answer in later for place in answer), asked)

    async def ask(self, talk: Talk, cache: Cache) -> tuple[list[float], list[int], bool]:
        """Return the log-probabilities of what is scored, the answer's tokens, and whether it is right."""
        sampling, first = make_sampling(seed=0, logprobs=1), talk.scored[0]
        request = Request(talk.ids, _MOST, sampling, cache=cache, eos=self._eos, score_from=first)
        check_request(request, self._chain.spec)
        found = await generate_once(self._chain, request)
        text = self._tokenizer.decode([token for token in found.tokens if token not in self._eos])
        scores = [found.scores[place - first].token.logprob for place in talk.scored]
        return scores, found.tokens, is_right(talk.asked, text, found.finish_reason == "stop")


@asynccontextmanager
async def _one_process(model: str) -> AsyncIterator[tuple[Chain, Any]]:
    options = cluster_options(None, model, 0)
    checkpoint, spec = await read_model(options.model)
    async with open_chain(replace(options, context=spec.context), checkpoint) as chain:
        yield chain, checkpoint


async def measure_quality(lengths: Sequence[int], conversations: int) -> list[Quality]:
    """Return a row per length and cache, from so many conversations of each kind of text."""
    async with _one_process("demo") as (chain, checkpoint):
        tokenizer = Tokenizer(checkpoint)
        eos = frozenset(eos_ids(checkpoint.config, checkpoint.generation_config) | tokenizer.eos)
        asker = Asker(chain, tokenizer, eos)
        turns = {kind: mix.held_out(kind, 100) for kind in mix.MEASURED}
        rows: list[Quality] = []
        for length in lengths:
            by_cache = {kv: Quality(length, kv) for kv in CACHES}
            for kind in mix.MEASURED:
                for number in range(conversations):
                    asked, *others = random.Random(number).sample(turns[kind], 1 + length // 40)
                    others += [turn for each in mix.MEASURED if each != kind for turn in turns[each][: length // 40]]
                    talk = asker.talk(random.Random(number).sample(others, len(others)), asked, length)
                    usual: list[int] = []
                    for kv, row in by_cache.items():
                        scores, tokens, right = await asker.ask(talk, CACHES[kv])
                        usual = usual or tokens
                        row.num_scored += len(scores)
                        row.logprob += math.fsum(scores)
                        row.num_answers += 1
                        row.num_right += right
                        row.num_equal += tokens == usual
                print(f"{length} tokens, {kind}", file=sys.stderr, flush=True)
            rows += by_cache.values()
        return rows


async def measure_speed(folder: Path, lengths: Sequence[int], rounds: int) -> list[Speed]:
    """Return a row per length and cache: the bytes of all layers' caches, and the median speed of one request."""
    rows = []
    async with _one_process(str(folder)) as (chain, _):
        for length in lengths:
            prompt = tuple(random.Random(length).randrange(1, chain.spec.vocab_size) for _ in range(length))
            found: dict[str, list[float]] = {kv: [] for kv in CACHES}
            nbytes = {}
            for _ in range(rounds):
                for kv, speeds in found.items():
                    request = Request(prompt, _DECODED, make_sampling(seed=0), cache=CACHES[kv])
                    answer = await generate_once(chain, request)
                    speeds.append(answer.tokens_per_s or 0.0)
                    nbytes[kv] = sum(status.cache_bytes for status in answer.statuses)
            rows += [Speed(length, kv, nbytes[kv], statistics.median(speeds)) for kv, speeds in found.items()]
            print(f"{length} tokens of a random model", file=sys.stderr, flush=True)
    return rows


def quality_table(rows: Sequence[Quality]) -> str:
    """As Markdown."""
    lines = [
        (str(row.length), row.kv, f"{row.perplexity:.4f}", f"{row.num_right} of {row.num_answers}", str(row.num_equal))
        for row in rows
    ]
    return table(("tokens", "KV cache", "perplexity", "right answers", "equal to full"), lines, 2)


def speed_table(rows: Sequence[Speed]) -> str:
    """As Markdown: bytes and speed by length, and their ratios to full caches."""
    full = {row.length: row for row in rows if row.kv == "full"}
    lines = []
    for row in rows:
        usual = full[row.length]
        bytes_ratio, speed_ratio = row.nbytes / usual.nbytes, row.tokens_per_s / usual.tokens_per_s
        cells = format_bytes(row.nbytes), f"{bytes_ratio:.2f}", f"{row.tokens_per_s:.1f}", f"{speed_ratio:.2f}"
        lines.append((str(row.length), row.kv, *cells))
    return table(("tokens", "KV cache", "bytes", "of full", "tok/s", "of full"), lines, 2)


def main(
    conversations: Annotated[int, typer.Option(min=1, help="Of each kind of text and length.")] = 5,
    lengths: Annotated[str, typer.Option(help="Tokens of the conversations.")] = "512,1024,2048",
    long: Annotated[str, typer.Option("--long-lengths", help="Tokens of the random model's prompts.")] = "2000",
    hidden: Annotated[int, typer.Option(help="The random model's hidden size; 8 layers.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Of the random model.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
) -> None:
    """Perplexity and right answers of held-out text, bytes and tokens per second by kind of cache and context."""
    measured = Measured(machine_name())
    measured.quality = uvloop.run(measure_quality(parse_counts("lengths", lengths, most=_CONTEXT), conversations))
    counts = parse_counts("long_lengths", long, most=2**20)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "random"
        random_model.main(folder, hidden=hidden, layers=8, context=max(counts) + _DECODED + 1)
        measured.speeds = uvloop.run(measure_speed(folder, counts, rounds))
    print(f"On {measured.machine}: the bundled model, then a random one of 8 layers, {hidden} wide, bfloat16\n")
    print(quality_table(measured.quality), speed_table(measured.speeds), sep="\n", end="")
    if json_file is not None:
        save(measured, json_file)


if __name__ == "__main__":
    run_command(main)
