"""What a soak asks: every decoder, greedy, sampled and penalised, prompts short and long, and prefixes in common."""

import random

from coordinator.decoding.decode_options import Decode
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from worker.model.model_spec import ModelSpec

_DECODES = (Decode(), Decode("ngram"), Decode("diffusion"), Decode("diffusion-fast", 8))
_SAMPLINGS = (
    Sampling(),
    Sampling(seed=7, temperature=0.8, top_p=0.95),
    Sampling(seed=5, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2),
)
_NUM_TOKENS = 32


def make_requests(spec: ModelSpec) -> list[Request]:
    """Of random tokens, the same ones at each call."""
    numbers = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(spec.vocab_size) for _ in range(count))

    common = tokens(100)
    found = []
    for decode in _DECODES:
        for sampling in _SAMPLINGS:
            prompts = (tokens(numbers.randint(1, 40)), (*common, *tokens(5)), tokens(300))
            found += [Request(prompt, _NUM_TOKENS, sampling, decode) for prompt in prompts]
    return found
