"""`brigade verify`: every tensor of every node, then tokens greedy and sampled, against the model on one machine."""

import gc
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import mlx.core as mx

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import say, show_steps, telling_interrupts
from coordinator.cluster.runner import generate
from coordinator.cluster.tokenizer import find_tokenizer
from coordinator.decoding.decode import Decode, suit
from coordinator.measure.alone import Alone
from coordinator.measure.prompts import make_requests
from coordinator.measure.replay import CHUNK, Replay
from coordinator.measure.streamed import Digests
from coordinator.measure.verdict import Case, Report, compare_tensors
from coordinator.planning.plan import Assignment
from coordinator.sessions.request import Request, check_request
from protos.brigade_pb2 import Cache
from worker.config import is_loopback, split_address
from worker.errors import InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.process.call_thread import run_aside
from worker.process.machine import memory_budget
from worker.process.mlx_thread import MlxThread
from worker.process.sizes import format_bytes

_NO_MLX_LM = "diffusion-fast"  # its tokens are not those of one-token decoding
_ONLY_WHOLE = f"{_NO_MLX_LM} can be compared only with itself on the whole model in memory"

Requests = Mapping[str, Request]


@dataclass(frozen=True)
class Testimony:
    """What a cluster says, for when it is closed and its memory is free."""

    split: tuple[Assignment, ...]
    digests: list[dict[str, str]]  # each node's
    answers: dict[str, list[int]]  # by the request's name
    streams: bool  # whether the reference is to read layer by layer


async def verify(
    options: ClusterOptions,
    decode: Decode,
    *,
    max_tokens: int,
    seed: int,
    stream: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compare a cluster, opened for this, with its model; shows on standard error how far it is.

    `tell` takes each line of the report as it is found, all but the summary.

    Needs the whole model on this machine's disk; in its memory, where that is not enough or `stream` is set, the layers
    one at a time.
    """
    checkpoint, spec = await read_model(options.model)
    decode = suit(decode, Cache(), spec)
    if stream and decode.kind == _NO_MLX_LM:
        raise InputError("stream", f"{_ONLY_WHOLE}; leave it out, or use diffusion")
    if max_tokens >= spec.context:
        raise InputError("max_tokens", f"expected less than the model's context of {spec.context}, got {max_tokens}")
    tokenizer = find_tokenizer(checkpoint, trust_remote_code=options.trust_remote_code)
    requests = make_requests(tokenizer, spec, decode, max_tokens, seed)
    for request in requests.values():
        check_request(request, spec)
    with show_steps(1) as begin, telling_interrupts("interrupted while the model was fetched: nothing is proved"):
        begin("fetching the whole model")
        await run_aside(lambda: checkpoint.fetch(checkpoint.tensors, lambda nbytes: None))
    with closing(MlxThread()) as thread:
        with telling_interrupts("interrupted while the cluster answered: nothing is proved"):
            testimony = await _ask(options, checkpoint, spec, requests, thread, stream=stream)
        await thread.run(_let_go)
        return await _judge(testimony, requests, Alone(checkpoint, spec, thread), tell)


async def _ask(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    requests: Requests,
    thread: MlxThread,
    *,
    stream: bool,
) -> Testimony:
    """Open the cluster, hear it, and close it again."""
    async with open_chain(options, checkpoint, spec, options.context, thread) as chain:
        streams = stream or _has_to_stream(options, chain, requests)
        with show_steps(chain.num_stages + len(requests)) as begin:
            digests = []
            holders: list[Chain | Peer] = [chain, *chain.peers]
            for node, holder in zip(chain.plan.assignments, holders, strict=True):
                begin(f"tensors of {node.name}")
                digests.append(await holder.digests())
            answers = {}
            for name, request in requests.items():
                begin(name)
                answers[name] = (await generate(chain, request, chunk=CHUNK)).tokens
        return Testimony(chain.plan.assignments, digests, answers, streams)


def _let_go() -> None:
    """The cluster's own shard, which tracebacks of its cancelled tasks still hold, and MLX's memory for reuse."""
    gc.collect()
    mx.clear_cache()


def _has_to_stream(options: ClusterOptions, chain: Chain, requests: Requests) -> bool:
    """Whether the whole model does not fit here once the chain is closed; tells the user if so.

    Raises InputError for a decoder whose reference cannot be streamed.
    """
    needed, budget = chain.spec.shard_bytes(0, chain.spec.num_layers), memory_budget() - _held_beside(options, chain)
    if needed <= budget:
        return False
    told = f"{format_bytes(needed)} do not fit into the {format_bytes(max(0, budget))} of this machine"
    if any(request.decode.kind == _NO_MLX_LM for request in requests.values()):
        raise InputError("decode", f"{_ONLY_WHOLE}, and {told}; use diffusion")
    say(f"{told}: the reference reads one layer at a time from disk")
    return True


def _held_beside(options: ClusterOptions, chain: Chain) -> int:
    """What workers on this machine go on holding; those that this process started end with the chain."""
    if options.local is not None:
        return 0
    workers = zip(chain.plan.assignments[1:], chain.peers, strict=True)
    return sum(node.needed_bytes for node, peer in workers if is_loopback(split_address(peer.address)[0]))


async def _judge(testimony: Testimony, requests: Requests, alone: Alone, tell: Callable[[str], None]) -> Report:
    """Compare what the cluster says with what the model on this machine does."""
    replays = [Replay(name, request, testimony.answers[name]) for name, request in requests.items()]
    digests: Digests = []
    await alone.read_layers([replay.feed() for replay in replays] if testimony.streams else [], digests)
    report = Report(testimony.split, *compare_tensors(testimony.split, testimony.digests, digests), testimony.streams)
    for line in report.of_tensors():
        tell(line)

    def take(case: Case) -> None:
        report.cases.append(case)
        tell(str(case))

    if testimony.streams:
        await alone.measure_differences(replays, take)
    elif any(request.decode.kind == _NO_MLX_LM for request in requests.values()):
        await alone.decode_again(requests, testimony.answers, take)
    else:
        await alone.replay_in_memory(replays, take)
    return report
