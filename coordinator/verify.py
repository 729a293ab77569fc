"""`brigade verify`: every tensor of every node, then tokens greedy and sampled, against mlx-lm in one process."""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console

from coordinator.chain import Chain
from coordinator.cluster import open_chain, read_model
from coordinator.generate import generate
from coordinator.options import ClusterOptions
from coordinator.reference import Reference
from coordinator.request import Request
from protos.brigade_pb2 import Sampling
from worker.checkpoint import Checkpoint
from worker.modelspec import ModelSpec
from worker.shard import Shard

_CHUNK = 16  # rows: small, so that prompts of a few dozen tokens already cross chunks


@dataclass(frozen=True)
class Case:
    """One prompt, its sampling, and what both sides made of it."""

    name: str
    expected: list[int]
    found: list[int]

    @property
    def first_difference(self) -> int | None:
        pairs = enumerate(zip(self.expected, self.found, strict=True))
        return next((i for i, (expected, found) in pairs if expected != found), None)


async def run_verify(options: ClusterOptions, *, max_tokens: int, seed: int, as_json: bool) -> int:
    """The exit code: 0 if the cluster is the model, 1 if not. Needs memory for the whole model in this process."""
    checkpoint, spec = await read_model(options.model)
    async with open_chain(options, checkpoint, spec, options.context) as chain:
        differing = await _differing_tensors(chain, checkpoint)
        reference = await chain.thread.run(lambda: _load_reference(checkpoint))
        cases = [await _compare(chain, reference, name, request) for name, request in _requests(spec, max_tokens, seed)]
    equal = not differing and all(case.first_difference is None for case in cases)
    if as_json:
        tensors = [{"node": node, "tensor": tensor} for node, tensor in differing]
        print(json.dumps({"equal": equal, "tensors": tensors, "cases": [asdict(case) for case in cases]}))
    else:
        _print(chain, differing, cases)
    return 0 if equal else 1


async def _differing_tensors(chain: Chain, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(node, tensor) wherever a worker holds other bytes than the coordinator's copy of the model."""
    differing = []
    for peer, node in zip(chain.peers, chain.plan.assignments[1:], strict=True):
        theirs = await peer.digests()
        ours = await chain.thread.run(lambda n=node: dict(Shard(checkpoint, n.start, n.end).digests()))  # type: ignore[misc]
        differing += [(peer.name, name) for name, digest in sorted(ours.items()) if theirs.get(name) != digest]
    return differing


def _load_reference(checkpoint: Checkpoint) -> Reference:
    checkpoint.fetch(checkpoint.tensors, lambda nbytes: None)
    return Reference(checkpoint.folder)


def _requests(spec: ModelSpec, max_tokens: int, seed: int) -> Iterator[tuple[str, Request]]:
    """Random prompts of several lengths, each greedy, sampled, and sampled with penalties."""
    numbers = random.Random(seed)
    longest = max(1, min(5 * _CHUNK + 3, spec.context - max_tokens))
    for length in sorted({1, min(7, longest), min(_CHUNK, longest), longest}):
        prompt = tuple(numbers.randrange(spec.vocab_size) for _ in range(length))
        sampled = Sampling(seed=seed, temperature=0.8, top_p=0.95, top_k=40, min_p=0.01)
        penalised = Sampling(seed=seed + 1, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2)
        for kind, sampling in (("greedy", Sampling()), ("sampled", sampled), ("penalised", penalised)):
            yield f"{kind}, prompt of {length}", Request(prompt, max_tokens, sampling)


async def _compare(chain: Chain, reference: Reference, name: str, request: Request) -> Case:
    answer = await generate(chain, request, chunk=_CHUNK)
    expected = await chain.thread.run(
        lambda: reference.generate(request.prompt, request.max_tokens, request.sampling, _CHUNK)
    )
    return Case(name, expected, answer.tokens)


def _print(chain: Chain, differing: list[tuple[str, str]], cases: list[Case]) -> None:
    console = Console(highlight=False)
    console.print(
        "split: " + " · ".join(f"{n.name} [{n.start}, {n.end})" for n in chain.plan.assignments), markup=False
    )
    for node, tensor in differing:
        console.print(f"DIFFERS  tensor {tensor} on worker {node}")
    for case in cases:
        at = case.first_difference
        verdict = f"equal    {case.name}: {len(case.found)} tokens" if at is None else (
            f"DIFFERS  {case.name}: token {at} is {case.found[at]}, mlx-lm's is {case.expected[at]}"
        )  # fmt: skip
        console.print(verdict)
    total = sum(len(case.found) for case in cases if case.first_difference is None)
    equal = not differing and all(case.first_difference is None for case in cases)
    console.print(f"the cluster is the model: {total} tokens equal" if equal else "the cluster is NOT the model")
