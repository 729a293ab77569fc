"""`brigade verify`: every tensor of every node, then tokens greedy and sampled, against mlx-lm in one process."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest

from rich.console import Console

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.runner import generate
from coordinator.decoding.decode import Decode, suit
from coordinator.measure.reference import Reference
from coordinator.planning.costs import StepCosts
from coordinator.sessions.request import Request, check_request
from coordinator.sessions.session import Session
from coordinator.sessions.text import Tokenizer, has_tokenizer
from protos.brigade_pb2 import Cache, Frame, Result, Sampling
from protos.brigade_pb2 import Session as Opening
from worker.compute.engine import Engine
from worker.compute.shard import Shard
from worker.errors import InputError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.process.call_thread import run_aside

Alone = Callable[[Request], list[int]]
Named = tuple[str, Request]

_TEXTS = ("Tell me a story about a fox.", "What is 48 + 27?")
_CHUNK = 16  # rows: small, so that prompts of a few dozen tokens already cross chunks


@dataclass(frozen=True)
class Case:
    """One prompt, its sampling, and what both sides made of it."""

    name: str
    expected: list[int]
    found: list[int]

    @property
    def first_difference(self) -> int | None:
        pairs = enumerate(zip_longest(self.expected, self.found))
        return next((i for i, (expected, found) in pairs if expected != found), None)


async def run_verify(options: ClusterOptions, decode: Decode, *, max_tokens: int, seed: int, as_json: bool) -> int:
    """The exit code: 0 if the cluster is the model, 1 if not. Needs memory for the whole model in this process."""
    checkpoint, spec = await read_model(options.model)
    decode = suit(decode, Cache(), spec)
    if max_tokens >= spec.context:
        raise InputError("max_tokens", f"expected less than the model's context of {spec.context}, got {max_tokens}")
    requests = _requests(checkpoint, spec, decode, max_tokens, seed)
    for _, request in requests:
        check_request(request, spec)
    await run_aside(lambda: checkpoint.fetch(checkpoint.tensors, lambda nbytes: None))
    async with open_chain(options, checkpoint, spec, options.context) as chain:
        num_tensors, differing = await _compare_tensors(chain, checkpoint)
        alone = await chain.thread.run(lambda: _load_alone(checkpoint, spec, decode))
        cases = [await _compare(chain, alone, name, request) for name, request in requests]
    equal = not differing and all(case.first_difference is None for case in cases)
    if as_json:
        tensors = [{"node": node, "tensor": tensor} for node, tensor in differing]
        print(json.dumps({"equal": equal, "tensors": tensors, "cases": [asdict(case) for case in cases]}))
    else:
        _print(chain, decode, num_tensors, differing, cases)
    return 0 if equal else 1


async def _compare_tensors(chain: Chain, checkpoint: Checkpoint) -> tuple[int, list[tuple[str, str]]]:
    """How many tensors the workers hold, and (node, tensor) wherever one is not that of the coordinator's copy."""
    num_tensors, differing = 0, []
    for peer, node in zip(chain.peers, chain.plan.assignments[1:], strict=True):
        theirs = await peer.digests()
        ours = await chain.thread.run(lambda n=node: dict(Shard(checkpoint, n.start, n.end).digests()))  # type: ignore[misc]
        num_tensors += len(ours)
        differing += [(peer.name, name) for name, digest in sorted(ours.items()) if theirs.get(name) != digest]
    return num_tensors, differing


def _load_alone(checkpoint: Checkpoint, spec: ModelSpec, decode: Decode) -> Alone:
    """The whole model in this process, as a function from a request to its tokens.

    What is lossless is compared with one-token decoding by mlx-lm; `diffusion-fast`, which mlx-lm does not have, with
    the same decoder on one shard that is the whole model.
    """
    if decode.kind != "diffusion-fast":
        reference = Reference(checkpoint.folder)
        return lambda request: reference.generate(request.prompt, request.max_tokens, request.sampling, _CHUNK)
    shard = Shard(checkpoint, 0, spec.num_layers)
    return lambda request: _run_alone(Engine(shard, 0, spec.dtype), request)


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


def _requests(checkpoint: Checkpoint, spec: ModelSpec, decode: Decode, max_tokens: int, seed: int) -> list[Named]:
    """Prompts of several kinds, each greedy, sampled, and sampled with penalties."""
    sampled = Sampling(seed=seed, temperature=0.8, top_p=0.95, top_k=40, min_p=0.01)
    penalised = Sampling(seed=(seed + 1) % 2**64, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2)
    kinds = (("greedy", Sampling()), ("sampled", sampled), ("penalised", penalised))
    prompts = {**_random_prompts(spec, max_tokens, seed), **_text_prompts(checkpoint, spec, max_tokens)}
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


def _text_prompts(checkpoint: Checkpoint, spec: ModelSpec, max_tokens: int) -> dict[str, tuple[int, ...]]:
    """Text as the model knows it, where it has a tokenizer: random tokens alone lead to dull answers."""
    if not has_tokenizer(checkpoint.folder):
        return {}
    tokenizer = Tokenizer(checkpoint.folder)
    prompts = {text: tuple(tokenizer.encode_prompt(text)) for text in _TEXTS}
    return {text: prompt for text, prompt in prompts.items() if 0 < len(prompt) <= spec.context - max_tokens}


async def _compare(chain: Chain, alone: Alone, name: str, request: Request) -> Case:
    answer = await generate(chain, request, chunk=_CHUNK)
    expected = await chain.thread.run(lambda: alone(request))
    return Case(name, expected, answer.tokens)


def _print(chain: Chain, decode: Decode, num_tensors: int, differing: list[tuple[str, str]], cases: list[Case]) -> None:
    console = Console(highlight=False)
    console.print(
        "split: " + " · ".join(f"{n.name} [{n.start}, {n.end})" for n in chain.plan.assignments), markup=False
    )
    if chain.peers and not differing:
        console.print(f"equal    {num_tensors} tensors on {len(chain.peers)} worker(s)")
    for node, tensor in differing:
        console.print(f"DIFFERS  tensor {tensor} on worker {node}")
    for case in cases:
        at = case.first_difference
        verdict = f"equal    {case.name}: {len(case.found)} tokens" if at is None else (
            f"DIFFERS  {case.name}: token {at} is {case.found[at : at + 1]}, alone it is {case.expected[at : at + 1]}"
        )  # fmt: skip
        console.print(verdict)
    total = sum(len(case.found) for case in cases if case.first_difference is None)
    equal = not differing and all(case.first_difference is None for case in cases)
    console.print(f"the cluster is the model: {total} tokens equal" if equal else "the cluster is NOT the model")
