"""`brigade verify`: every tensor of every node, then tokens greedy and sampled, against mlx-lm in one process."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.progress import Begin, show_steps
from coordinator.cluster.runner import generate
from coordinator.cluster.tokenizer import Tokenizer, find_tokenizer
from coordinator.decoding.decode import Decode, suit
from coordinator.measure.reference import Reference, chunks
from coordinator.measure.rounding import Rounding, measure_rounding
from coordinator.measure.verdict import Case, Report
from coordinator.planning.costs import StepCosts
from coordinator.sessions.request import Request, check_request
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Cache, Frame, Result, Sampling
from protos.brigade_pb2 import Session as Opening
from worker.compute.engine import Engine
from worker.compute.shard import Shard
from worker.errors import InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.process.call_thread import run_aside

Named = tuple[str, Request]

_TEXTS = ("Tell me a story about a fox.", "What is 48 + 27?")
_CHUNK = 16  # rows: small, so that prompts of a few dozen tokens already cross chunks


@dataclass(frozen=True)
class Alone:
    """The whole model in this process. MLX thread only.

    `measure` takes a request, the tokens expected up to and with a difference, and the token found there; None where
    there is no other way of evaluating the same thing.
    """

    generate: Callable[[Request], list[int]]
    measure: Callable[[Request, list[int], int], Rounding] | None = None


async def verify(
    options: ClusterOptions,
    decode: Decode,
    *,
    max_tokens: int,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compare a cluster, opened for this, with its model; shows on standard error how far it is.

    `tell` takes each line of the report as it is found, all but the summary.

    Needs memory for the whole model in this process.
    """
    checkpoint, spec = await read_model(options.model)
    decode = suit(decode, Cache(), spec)
    if max_tokens >= spec.context:
        raise InputError("max_tokens", f"expected less than the model's context of {spec.context}, got {max_tokens}")
    tokenizer = find_tokenizer(checkpoint, trust_remote_code=options.trust_remote_code)
    requests = _requests(tokenizer, spec, decode, max_tokens, seed)
    for _, request in requests:
        check_request(request, spec)
    with show_steps(1) as begin:
        begin("fetching the whole model")
        await run_aside(lambda: checkpoint.fetch(checkpoint.tensors, lambda nbytes: None))
    async with open_chain(options, checkpoint, spec, options.context) as chain:
        with show_steps(chain.num_stages + 1 + len(requests)) as begin:
            num_tensors, differing = await compare_tensors(chain, checkpoint, begin)
            begin("loading the model in one process")
            alone = await chain.thread.run(lambda: load_alone(checkpoint, spec, decode))
            report = Report(chain.plan.assignments, num_tensors, differing)
            for line in report.of_tensors():
                tell(line)
            for name, request in requests:
                report.cases.append(await compare(chain, alone, name, request, begin))
                tell(str(report.cases[-1]))
        return report


async def compare_tensors(chain: Chain, checkpoint: Checkpoint, begin: Begin) -> tuple[int, list[tuple[str, str]]]:
    """How many tensors the nodes hold, and (node, tensor) wherever one is not what the coordinator's files hold."""
    num_tensors, differing = 0, []
    holders: list[Chain | Peer] = [chain, *chain.peers]
    for node, holder in zip(chain.plan.assignments, holders, strict=True):
        begin(f"tensors of {node.name}")
        theirs = await holder.digests()
        ours = await chain.thread.run(lambda n=node: dict(Shard(checkpoint, n.start, n.end).digests()))  # type: ignore[misc]
        num_tensors += len(ours)
        names = sorted({*ours, *theirs})
        differing += [(node.name, name) for name in names if theirs.get(name) != ours.get(name)]
    return num_tensors, differing


def load_alone(checkpoint: Checkpoint, spec: ModelSpec, decode: Decode) -> Alone:
    """What is lossless is compared with one-token decoding by mlx-lm; `diffusion-fast`, which mlx-lm does not have,
    with the same decoder on one shard that is the whole model.
    """
    if decode.kind == "diffusion-fast":
        shard = Shard(checkpoint, 0, spec.num_layers)
        return Alone(lambda request: _run_alone(Engine(shard, 0, spec.dtype), request))
    reference = Reference(checkpoint.folder)

    def measure(request: Request, expected: list[int], found: int) -> Rounding:
        windows = [*chunks(request.prompt, _CHUNK), *([token] for token in expected[:-1])]
        return measure_rounding(reference, request.sampling, windows, expected[-1], found)

    return Alone(lambda r: reference.generate(r.prompt, r.max_tokens, r.sampling, _CHUNK), measure)


def _run_alone(engine: Engine, request: Request) -> list[int]:
    """The request on an engine that is the whole model, without chain, scheduler and sockets."""
    decoder = request.decode.make_decoder(request.eos, StepCosts())
    session = Session(request.prompt, request.max_tokens, decoder=decoder, chunk=_CHUNK)
    session.slot = 0
    frame = Frame(opened=[Opening(slot=0, sampling=request.sampling)])
    while session.finish_reason is None:
        frame.windows.append(session.next_window())
        result = engine.step(frame, received=0)
        assert isinstance(result, Result)
        session.commit(result.samples, result.guesses)
        frame = Frame()
    return session.generated


def _requests(tokenizer: Tokenizer | None, spec: ModelSpec, decode: Decode, max_tokens: int, seed: int) -> list[Named]:
    """Prompts of several kinds, each greedy, sampled, and sampled with penalties."""
    sampled = Sampling(seed=seed, temperature=0.8, top_p=0.95, top_k=40, min_p=0.01)
    penalised = Sampling(seed=(seed + 1) % 2**64, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2)
    kinds = (("greedy", Sampling()), ("sampled", sampled), ("penalised", penalised))
    prompts = {**_random_prompts(spec, max_tokens, seed), **_text_prompts(tokenizer, spec, max_tokens)}
    return [
        (f"{kind}, {name}", Request(prompt, max_tokens, sampling, decode))
        for name, prompt in prompts.items()
        for kind, sampling in kinds
    ]


def _random_prompts(spec: ModelSpec, max_tokens: int, seed: int) -> dict[str, tuple[int, ...]]:
    """Of one token, of some, of a chunk, and of several chunks."""
    numbers = random.Random(seed)
    longest = max(1, min(5 * _CHUNK + 3, spec.context - max_tokens))
    lengths = sorted({1, min(7, longest), min(_CHUNK, longest), longest})
    return {f"{n} random tokens": tuple(numbers.randrange(spec.vocab_size) for _ in range(n)) for n in lengths}


def _text_prompts(tokenizer: Tokenizer | None, spec: ModelSpec, max_tokens: int) -> dict[str, tuple[int, ...]]:
    """Text as the model knows it, where it has a tokenizer: random tokens alone lead to dull answers."""
    if tokenizer is None:
        return {}
    prompts = {text: tuple(tokenizer.encode_prompt(text)) for text in _TEXTS}
    return {text: prompt for text, prompt in prompts.items() if 0 < len(prompt) <= spec.context - max_tokens}


async def compare(chain: Chain, alone: Alone, name: str, request: Request, begin: Begin) -> Case:
    """One request on both sides; where their tokens part, whether rounding explains it."""
    begin(name)
    found = (await generate(chain, request, chunk=_CHUNK)).tokens
    expected = await chain.thread.run(lambda: alone.generate(request))
    case = Case(name, expected, found)
    at, measure = case.first_difference, alone.measure
    if at is None or measure is None or at >= min(len(expected), len(found)):
        return case
    rounding = await chain.thread.run(lambda: measure(request, expected[: at + 1], found[at]))
    return replace(case, rounding=rounding)
