"""What the commands do once their flags are parsed."""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.cli.report import logprobs_of, plan_as_json, print_plan, print_summary, stages_of, stats_of
from coordinator.cli.trace import trace_events
from coordinator.cluster.chain import Chain
from coordinator.cluster.open import make_plan, open_chain, open_peers, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.runner import generate
from coordinator.decoding.decode import Decode, suit
from coordinator.measure.bench import Workload, measure
from coordinator.measure.bench_plot import check_plot, write_plot
from coordinator.measure.bench_report import print_bench, to_markdown
from coordinator.planning.plan import require_fit
from coordinator.sessions.answer import Answer
from coordinator.sessions.request import Request, check_request
from coordinator.sessions.text import TextStream, TokenIds, Tokenizer, eos_ids, has_tokenizer
from protos.brigade_pb2 import Cache, Sampling
from worker.errors import InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec


@dataclass(frozen=True)
class Wish:
    """What `generate` is asked for, beyond the cluster: the prompt as text or as token ids, and how to go on."""

    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    system: str | None = None
    raw: bool = False
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    decode: Decode = field(default_factory=lambda: Decode("auto"))
    cache: Cache = field(default_factory=Cache)
    repeat_guard: int = 0
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    chunk: int | None = None
    as_json: bool = False
    trace: Path | None = None


async def run_generate(options: ClusterOptions, wish: Wish) -> None:
    """One request: text to standard output as it comes, the summary to standard error."""
    for name, text in (("prompt", wish.prompt), ("system_prompt", wish.system), *(("stop", s) for s in wish.stops)):
        _require_utf8(name, text or "")
    if wish.trace is not None:
        _require_writable("trace", wish.trace)
    checkpoint, spec = await read_model(options.model)
    spec = replace(spec, cache=wish.cache)
    tokenizer = _tokenizer(wish, checkpoint.folder)
    request = _make_request(wish, checkpoint, spec, tokenizer)
    check_request(request, spec)
    stream = tokenizer.stream(request.stops) if tokenizer else TokenIds()
    context = max(options.context, len(request.prompt) + request.max_tokens)
    async with open_chain(options, checkpoint, spec, context) as chain:
        emit = (lambda text: None) if wish.as_json else _print_piece
        answer = await generate(chain, request, stream=stream, emit=emit, chunk=wish.chunk, traced=True)
        _report(chain, answer, wish, stream)


async def run_plan(options: ClusterOptions, *, as_json: bool) -> None:
    """Print where each layer would go. Raises ConfigError, after printing, if it does not fit."""
    _, spec = await read_model(options.model)
    async with open_peers(options, spec) as peers:
        plan = await make_plan(options.cluster, spec, peers, options.context)
    if as_json:
        print(json.dumps(plan_as_json(plan, spec)))
    else:
        print_plan(plan, spec)
    require_fit(plan, spec)


async def run_bench(
    options: ClusterOptions, workload: Workload, *, as_json: bool, is_wide: bool = False, plot: Path | None
) -> None:
    """Measure, then print the table or the JSON object; last, where nothing can be lost any more, the picture.

    Raises:
        BrigadeError: the cluster failed; after what was measured until then is printed.
    """
    if plot is not None:
        check_plot(plot)
        _require_writable("plot", plot)
    bench = await measure(options, workload)
    if as_json:
        print(json.dumps(bench.as_json()), flush=True)
    elif is_wide:
        print(to_markdown(bench), flush=True)
    else:
        print_bench(bench)
    if plot is not None:
        write_plot(bench, plot)
    if bench.failure is not None:
        raise bench.failure


def _tokenizer(wish: Wish, folder: Path) -> Tokenizer | None:
    """None only where nothing asks for text and the model has no tokenizer."""
    if wish.prompt is None and not wish.stops and not has_tokenizer(folder):
        return None
    return Tokenizer(folder)


def _make_request(wish: Wish, checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer | None) -> Request:
    eos = eos_ids(checkpoint.folder, checkpoint.config) | (tokenizer.eos if tokenizer else frozenset())
    return Request(
        prompt=_prompt_ids(wish, tokenizer),
        max_tokens=wish.max_tokens,
        sampling=wish.sampling,
        stops=wish.stops,
        eos=frozenset() if wish.ignore_eos else eos,
        decode=suit(wish.decode, wish.cache, spec),
        cache=wish.cache,
        repeat_guard=wish.repeat_guard,
    )


def _prompt_ids(wish: Wish, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if wish.prompt_tokens is not None:
        return wish.prompt_tokens
    assert tokenizer is not None and wish.prompt is not None
    if not (wish.prompt if wish.raw else wish.prompt.strip()):
        raise InputError("prompt", "expected some text, found none")
    if wish.raw:
        return tuple(tokenizer.encode(wish.prompt))
    messages = [{"role": "system", "content": wish.system}] if wish.system else []
    return tuple(tokenizer.encode_chat([*messages, {"role": "user", "content": wish.prompt}]))


def _report(chain: Chain, answer: Answer, wish: Wish, stream: TextStream | TokenIds) -> None:
    waterfall = answer.waterfall(chain.clock_offsets)
    if wish.trace is not None:
        nodes = [node.name for node in chain.plan.assignments]
        trace = trace_events(answer.passages, chain.clock_offsets, nodes)
        wish.trace.write_text(json.dumps(trace), encoding="utf-8")
    if not wish.as_json:
        print(flush=True)
        print_summary(answer, chain.plan, waterfall)
        return
    result: dict[str, Any] = {
        "text": stream.text,
        "tokens": answer.tokens,
        "prompt_tokens": answer.num_prompt,
        "finish_reason": answer.finish_reason,
        "logprobs": logprobs_of(answer.samples) if wish.sampling.logprobs else None,
        "seed": wish.sampling.seed,
        "stats": stats_of(answer),
        "stages": stages_of(answer, chain.plan, waterfall),
        "waterfall": {"wall_ms": waterfall.wall_ms, **waterfall.parts},
    }
    print(json.dumps(result), flush=True)


def _require_utf8(name: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how python reads bytes that are no UTF-8
        raise InputError(name, "expected UTF-8 text, found other bytes")


def _require_writable(name: str, path: Path) -> None:
    """Refuse now what cannot be written once the answer is there."""
    try:
        path.open("a").close()
    except OSError as error:
        raise InputError(name, f"cannot write {path}: {error.strerror}") from error


def _print_piece(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
