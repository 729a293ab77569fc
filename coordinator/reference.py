"""The same model in one process, loaded and run by mlx-lm alone: what every split is compared with. MLX thread only."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from coordinator.lengths import largest_within
from protos.brigade_pb2 import Sampling
from worker.checkpoint import read_config
from worker.families import family_of, mask_token_of
from worker.sampling import Sampler


class Reference:
    """The unsharded model of a folder."""

    def __init__(self, folder: Path) -> None:
        config = read_config(folder)
        module = family_of(config).module
        self._mask_token = mask_token_of(config)
        self.model, _ = load_model(folder, model_config={"model_type": module})

    def generate(self, prompt: Sequence[int], num_tokens: int, sampling: Sampling, chunk: int) -> list[int]:
        """Continue the prompt by `num_tokens` tokens, fed in the chunks of at most `chunk` that a session makes."""
        cache = make_prompt_cache(self.model)
        sampler = Sampler(sampling)
        tokens = list(prompt)
        fed = 0
        while len(tokens) < len(prompt) + num_tokens:
            window = tokens[fed : fed + largest_within(min(chunk, len(tokens) - fed))]
            logits = self.logits(window, cache)
            mx.eval(logits)
            fed += len(window)
            if fed == len(tokens):
                tokens.append(sampler(logits, [len(tokens)], tokens, [len(tokens)]).to_samples(slot=0)[0].token)
        return tokens[len(prompt) :]

    def logits(self, window: Sequence[int], cache: list[object]) -> mx.array:
        """Feed one window [L]; its last row's logits [1, V] float32."""
        logits = self.model(mx.array([list(window)]), cache=cache)[:, -1].astype(mx.float32)
        if self._mask_token is not None:
            logits[:, self._mask_token] = -mx.inf  # as in the cluster: no token to say
        return logits
