"""What `brigade verify` asks: prompts of several kinds, each greedy, sampled, and sampled with penalties."""

import random

from coordinator.cluster.tokenizer import Tokenizer
from coordinator.decoding.decode import Decode
from coordinator.measure.replay import CHUNK
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from worker.model.modelspec import ModelSpec

_TEXTS = ("Tell me a story about a fox.", "What is 48 + 27?")


def make_requests(
    tokenizer: Tokenizer | None, spec: ModelSpec, decode: Decode, max_tokens: int, seed: int
) -> dict[str, Request]:
    """Each with its name."""
    sampled = Sampling(seed=seed, temperature=0.8, top_p=0.95, top_k=40, min_p=0.01)
    penalised = Sampling(seed=(seed + 1) % 2**64, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2)
    kinds = (("greedy", Sampling()), ("sampled", sampled), ("penalised", penalised))
    prompts = {**_random_prompts(spec, max_tokens, seed), **_text_prompts(tokenizer, spec, max_tokens)}
    return {
        f"{kind}, {name}": Request(prompt, max_tokens, sampling, decode)
        for name, prompt in prompts.items()
        for kind, sampling in kinds
    }


def _random_prompts(spec: ModelSpec, max_tokens: int, seed: int) -> dict[str, tuple[int, ...]]:
    """Of one token, of some, of a chunk, and of several chunks."""
    numbers = random.Random(seed)
    longest = max(1, min(5 * CHUNK + 3, spec.context - max_tokens))
    lengths = sorted({1, min(7, longest), min(CHUNK, longest), longest})
    return {f"{n} random tokens": tuple(numbers.randrange(spec.vocab_size) for _ in range(n)) for n in lengths}


def _text_prompts(tokenizer: Tokenizer | None, spec: ModelSpec, max_tokens: int) -> dict[str, tuple[int, ...]]:
    """Text as the model knows it, where it has a tokenizer: random tokens alone lead to dull answers."""
    if tokenizer is None:
        return {}
    prompts = {text: tuple(tokenizer.encode_prompt(text)) for text in _TEXTS}
    return {text: prompt for text, prompt in prompts.items() if 0 < len(prompt) <= spec.context - max_tokens}
