"""What is asked of the bundled model while faults happen: every decoder, and every way of drawing."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from coordinator.decoding.decode_options import Decode
from coordinator.planning.recovery import Limits
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tools.faults.rig import Rig
from tools.faults.trial import Trial

MAX_TOKENS = 48
FOX = "Tell me a story about a fox."
SUM = "Tom has 48 apples. He buys 27 more and then gives away 30. How many apples does Tom have?"
CODE = "Write a Python function that multiplies a number by 12."

DECODES = {
    "ar": Decode(),
    "ngram": Decode("ngram"),
    "diffusion": Decode("diffusion", 4),
    "diffusion-fast": Decode("diffusion-fast", 4),
}
KINDS = ("greedy", "sampled", "penalties", "prefix-forked", "stop strings")
SAMPLED = Sampling(seed=7, temperature=0.8)
_PENALISED = Sampling(seed=5, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4)
_ROUGH = Sampling(seed=3, temperature=1.2, top_p=0.95)


def greedy(rig: Rig, decode: str = "ar", prompt: str = FOX, max_tokens: int = MAX_TOKENS) -> Request:
    return Request(rig.prompt(prompt), max_tokens, decode=DECODES[decode], eos=rig.eos)


def four(rig: Rig, decode: str) -> list[Request]:
    """Side by side: greedy, a fork of its prompt, sampled, penalised."""
    first = greedy(rig, decode)
    samplings = (_ROUGH, first.prompt), (SAMPLED, rig.prompt(SUM)), (_PENALISED, rig.prompt(CODE))
    return [first, *(replace(first, sampling=sampling, prompt=prompt) for sampling, prompt in samplings)]


@asynccontextmanager
async def asking_four(
    rig: Rig, limits: Limits, via: dict[str, str] | None = None, failpoints: Mapping[str, str] = {}
) -> AsyncIterator[tuple[Trial, list[Request], list[Answer]]]:
    """Open a cluster over whole workers. Yield it with four requests and the answers that one process gives."""
    await rig.make_whole(**failpoints)
    asked = four(rig, "ar")
    expected = await rig.expected(asked)
    async with rig.opened(rig.options(limits, via=via)) as trial:
        yield trial, asked, expected


async def of_kind(rig: Rig, kind: str, decode: str) -> list[Request]:
    """What shows that this kind of answer goes on."""
    first, fork, sampled, penalised = four(rig, decode)
    if kind == "stop strings":
        [whole] = await rig.expected([penalised])
        middle = len(whole.text) // 2
        return [replace(penalised, stops=(whole.text[middle : middle + 12],))]
    return {"greedy": [first], "sampled": [sampled], "penalties": [penalised], "prefix-forked": [first, fork]}[kind]
