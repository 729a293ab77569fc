"""`brigade verify`: compares all tensors of all nodes, and greedy and sampled tokens, with the model on one machine."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest

import mlx.core as mx

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import say, show_steps, telling_interrupts
from coordinator.decoding.decode_options import LOSSY, Decode, suit
from coordinator.engine.engine import generate_once
from coordinator.engine.tokenizer import Tokenizer, find_tokenizer
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Assignment
from coordinator.quality.reference import LayerDigests, Reference, stream_layers
from coordinator.quality.replay import CHUNK, ForcedPass, Replay
from coordinator.quality.report import ComparedAnswer, VerifyReport, compare_tensors
from coordinator.sessions.request import Conversation, Request, check_request
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Cache, Frame, Opening, Result, Sampling
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.config import is_here
from worker.errors import InputError
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.model.model_spec import ModelSpec
from worker.platform.machine import memory_budget, thaw_heap
from worker.platform.text import format_bytes
from worker.platform.threads import MlxThread, run_in_thread

_ONLY_WHOLE = "can be compared only with itself on the whole model in memory"
_IN_MEMORY = "interrupted while one process was asked: nothing is proved"
_END_S = 10.0  # for what was cancelled on the MLX thread
_NUM_DRAFTS = 3  # where measurements would choose: they could choose none, which would not show how many hold
_TEXTS = ("Tell me a story about a fox.", "What is 48 + 27?")

Requests = Mapping[str, Request]  # by name
TakeAnswer = Callable[[ComparedAnswer], None]


@dataclass(frozen=True)
class _ClusterAnswers:
    """The answers of a cluster, which are compared after it is closed and its memory is free."""

    split: tuple[Assignment, ...]
    digests: list[dict[str, str]]  # of each node's tensors
    tokens: dict[str, list[int]]  # by the request's name
    is_streamed: bool  # whether the reference reads layer by layer
    drafts_held: list[float] = field(default_factory=list)  # the share that held, by place


async def verify(
    options: ClusterOptions,
    decode: Decode,
    *,
    max_tokens: int,
    seed: int,
    stream: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> VerifyReport:
    """Compare a cluster, opened for this, with its model; shows progress on standard error.

    The whole model must be on this machine's disk. If it does not fit in memory, or `stream` is set, the reference
    reads one layer at a time.

    Args:
        tell: takes each line of the report at once, except the summary.
    Raises:
        InputError: the model cannot serve such requests, or this decoder has no reference here.
        BrigadeError: the cluster failed.
    """
    checkpoint, spec = await read_model(options.model, options.draft_model)
    decode = suit(decode, Cache(), spec)
    if decode.kind == "draft" and decode.num_drafts is None:
        decode = replace(decode, num_drafts=min(_NUM_DRAFTS, spec.most_drafts))
    if stream and decode.kind in LOSSY:
        raise InputError("stream", f"{decode.kind} {_ONLY_WHOLE}; leave it out, or use a lossless decoder")
    if max_tokens >= spec.context:
        raise InputError("max_tokens", f"expected less than the model's context of {spec.context}, got {max_tokens}")
    tokenizer = find_tokenizer(checkpoint, trust_remote_code=options.trust_remote_code)
    requests = _make_requests(tokenizer, spec, decode, max_tokens, seed)
    for request in requests.values():
        check_request(request, spec)
    with show_steps(1) as begin, telling_interrupts("interrupted while the model was fetched: nothing is proved"):
        begin("fetching the whole model")
        await run_in_thread(lambda: checkpoint.fetch(checkpoint.tensors, lambda nbytes: None))
    with closing(MlxThread()) as thread:
        with telling_interrupts("interrupted while the cluster answered: nothing is proved"):
            answers = await _ask_cluster(options, checkpoint, requests, thread, stream=stream)
        # the cluster's own shard, which tracebacks of cancelled tasks still hold, and MLX's buffer cache
        await thread.call(_others_ended())
        await thread.run(thaw_heap)
        await thread.run(mx.clear_cache)
        return await _compare(answers, requests, Comparison(checkpoint, thread), tell)


async def _others_ended() -> None:
    """Wait until all other tasks of this loop have ended, which were cancelled: their frames hold the shard, too."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=_END_S)


class Comparison:
    """Compares a cluster's answers with the model on this machine; shows progress on standard error."""

    def __init__(self, checkpoint: Checkpoint, thread: MlxThread) -> None:
        self._checkpoint = checkpoint
        self._spec = describe(checkpoint)
        self._thread = thread

    async def stream_layers(self, passes: Sequence[ForcedPass], digests: LayerDigests | None = None) -> None:
        """Run the passes through the layers, one of which is in memory at a time; `digests` gets each layer's."""
        num_layers, at = self._spec.num_layers, -1
        pieces = stream_layers(self._checkpoint, num_layers, passes, digests)
        with (
            telling_interrupts(lambda: f"interrupted at layer {at + 1} of {num_layers}: nothing is proved"),
            show_steps(num_layers) as begin,
        ):
            while (layer := await self._thread.run(lambda: next(pieces, None))) is not None:
                if layer > at:
                    at = layer
                    begin(f"layer {layer + 1} of {num_layers}")

    async def replay_in_memory(self, replays: Sequence[Replay], take: TakeAnswer) -> None:
        """Compare with mlx-lm's model in memory."""
        with show_steps(1 + len(replays)) as begin, telling_interrupts(_IN_MEMORY):
            begin("loading the model in one process")
            reference = await self._thread.run(lambda: Reference(self._checkpoint.folder))
            for replay in replays:
                begin(replay.name)
                await self._thread.run(partial(_replay, reference, replay))
                take(replay.case())

    async def decode_again(self, requests: Requests, found: Mapping[str, list[int]], take: TakeAnswer) -> None:
        """Compare with the same decoder on a shard of the whole model: mlx-lm has no `diffusion-fast`."""
        with show_steps(1 + len(requests)) as begin, telling_interrupts(_IN_MEMORY):
            begin("loading the model in one process")
            executor = await self._thread.run(self._make_executor)
            for name, request in requests.items():
                begin(name)
                expected = await self._thread.run(partial(_decode, executor, request))
                take(ComparedAnswer(name, expected, found[name]))

    def _make_executor(self) -> Executor:
        shard = Shard(self._checkpoint, 0, self._spec.num_layers)
        shard.materialise(lambda nbytes: None)
        return Executor(shard, 0, self._spec.dtype)


def _make_requests(
    tokenizer: Tokenizer | None, spec: ModelSpec, decode: Decode, max_tokens: int, seed: int
) -> dict[str, Request]:
    """Return prompts of several kinds, each greedy, sampled, and sampled with penalties, by name.

    Random prompts have one token, a few, a chunk, and several chunks. A model with a tokenizer also gets text, since
    answers to random tokens have little variety.
    """
    numbers = random.Random(seed)
    longest = max(1, min(5 * CHUNK + 3, spec.context - max_tokens))
    drawn = (token for token in iter(lambda: numbers.randrange(spec.vocab_size), None) if spec.is_text(token))
    prompts = {
        f"{length} random tokens": tuple(islice(drawn, length))
        for length in sorted({1, min(7, longest), min(CHUNK, longest), longest})
    }
    if tokenizer is not None:
        asked: Iterable[Conversation | str] = map(Conversation.of, _TEXTS) if tokenizer.has_chat_template else _TEXTS
        texts = {text: tuple(tokenizer.encode_prompt(prompt)) for text, prompt in zip(_TEXTS, asked, strict=True)}
        prompts |= {text: prompt for text, prompt in texts.items() if 0 < len(prompt) <= spec.context - max_tokens}
    samplings = {
        "greedy": Sampling(),
        "sampled": Sampling(seed=seed, temperature=0.8, top_p=0.95, top_k=40, min_p=0.01),
        "penalised": Sampling(seed=(seed + 1) % 2**64, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2),
    }
    if decode.kind == "canvas":
        del samplings["penalised"]  # it takes no penalties
    if decode.training and decode.training.refinement:  # and this one no filters
        samplings["sampled"] = Sampling(seed=seed, temperature=0.8)
    return {
        f"{kind}, {name}": Request(prompt, max_tokens, sampling, decode)
        for name, prompt in prompts.items()
        for kind, sampling in samplings.items()
    }


async def _ask_cluster(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    requests: Requests,
    thread: MlxThread,
    *,
    stream: bool,
) -> _ClusterAnswers:
    """Open the cluster, get its digests and answers, and close it."""
    async with open_chain(options, checkpoint, thread) as chain:
        is_streamed = stream or _has_to_stream(options, chain, requests)
        with show_steps(chain.num_stages + len(requests)) as begin:
            digests = []
            holders: list[Chain | Peer] = [chain, *chain.peers]
            for node, holder in zip(chain.plan.assignments, holders, strict=True):
                begin(f"tensors of {node.name}")
                digests.append(await holder.digests())
            tokens, usages = {}, []
            for name, request in requests.items():
                begin(name)
                answer = await generate_once(chain, request, chunk=CHUNK)
                tokens[name] = answer.tokens
                usages.append(answer.usage)
        held = zip_longest(*(usage.num_drafts_held for usage in usages), fillvalue=0)
        tried = zip_longest(*(usage.num_drafts for usage in usages), fillvalue=0)
        shares = [sum(each) / sum(of) for each, of in zip(held, tried, strict=True)]
        return _ClusterAnswers(chain.plan.assignments, digests, tokens, is_streamed, shares)


def _has_to_stream(options: ClusterOptions, chain: Chain, requests: Requests) -> bool:
    """Return whether the whole model does not fit here once the chain is closed; tell the user if so.

    Raises:
        InputError: the reference of a request's decoder cannot be streamed.
    """
    needed = chain.spec.shard_bytes(0, chain.spec.num_layers)
    budget = memory_budget()
    if options.local is None:  # workers on this machine keep their part; those of this process end with the chain
        workers = zip(chain.plan.assignments[1:], chain.peers, strict=True)
        budget -= sum(node.needed_bytes for node, peer in workers if is_here(peer.address))
    if needed <= budget:
        return False
    problem = f"{format_bytes(needed)} do not fit into the {format_bytes(max(0, budget))} of this machine"
    if lossy := next((each.decode.kind for each in requests.values() if each.decode.kind in LOSSY), None):
        raise InputError("decode", f"{lossy} {_ONLY_WHOLE}, and {problem}; use a lossless decoder")
    say(f"{problem}: the reference reads one layer at a time from disk")
    return True


async def _compare(
    answers: _ClusterAnswers, requests: Requests, comparison: Comparison, tell: Callable[[str], None]
) -> VerifyReport:
    replays = [Replay(name, request, answers.tokens[name]) for name, request in requests.items()]
    digests: LayerDigests = []
    passes = [replay.decode_pass() for replay in replays] if answers.is_streamed else []
    await comparison.stream_layers(passes, digests)
    tensors = compare_tensors(answers.split, answers.digests, digests)
    report = VerifyReport(answers.split, *tensors, answers.is_streamed, answers.drafts_held)
    for line in report.of_tensors():
        tell(line)

    def take(case: ComparedAnswer) -> None:
        report.cases.append(case)
        tell(str(case))

    if answers.is_streamed:
        if passes := [forced for replay in replays for forced in replay.rounding_passes()]:
            await comparison.stream_layers(passes)
        for replay in replays:
            take(replay.case())
    elif any(request.decode.kind in LOSSY for request in requests.values()):
        await comparison.decode_again(requests, answers.tokens, take)
    else:
        await comparison.replay_in_memory(replays, take)
    return report


def _replay(reference: Reference, replay: Replay) -> None:
    reference.read(replay.decode_pass())
    for forced in replay.rounding_passes():
        reference.read(forced)


def _decode(executor: Executor, request: Request) -> list[int]:
    """Decode the request on an executor that holds the whole model, without chain, scheduler and sockets."""
    decoder = request.decode.make_decoder(request.eos, ChainCosts(1), seed=request.sampling.seed)
    session = Session(request, decoder, chunk=CHUNK)
    session.slot = 0
    frame = Frame(opened=[Opening(slot=0, sampling=request.sampling)])
    while session.finish_reason is None:
        frame.windows.append(session.next_window())
        result = executor.step(frame, received=0)
        assert isinstance(result, Result)
        session.commit(result.samples, result.guesses, soft=result.soft)
        frame = Frame()
    return session.generated
