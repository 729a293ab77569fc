"""The same model in one process, loaded and run by mlx-lm alone: what every split is compared with. MLX thread only."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from protos.brigade_pb2 import Sampling
from worker.checkpoint import read_config
from worker.families import family_of
from worker.sampling import Sampler


class Reference:
    """The unsharded model of a folder."""

    def __init__(self, folder: Path) -> None:
        module = family_of(read_config(folder)).module
        self.model, _ = load_model(folder, model_config={"model_type": module})

    def generate(self, prompt: Sequence[int], num_tokens: int, sampling: Sampling, chunk: int) -> list[int]:
        """Continue the prompt, fed in chunks of at most `chunk` tokens, by `num_tokens` tokens."""
        cache = make_prompt_cache(self.model)
        sampler = Sampler(sampling)
        tokens = list(prompt)
        fed = 0
        while len(tokens) < len(prompt) + num_tokens:
            window = tokens[fed : fed + chunk]
            logits = self.logits(window, cache)
            mx.eval(logits)
            fed += len(window)
            if fed == len(tokens):
                tokens.append(sampler(logits, tokens).to_sample(slot=0).token)
        return tokens[len(prompt) :]

    def logits(self, window: Sequence[int], cache: list[object]) -> mx.array:
        """Feed one window [L]; its last row's logits [1, V] float32."""
        return self.model(mx.array([list(window)]), cache=cache)[:, -1].astype(mx.float32)
