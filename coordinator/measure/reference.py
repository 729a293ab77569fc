"""The same model in one process, loaded and run by mlx-lm alone: what every split is compared with. MLX thread only."""

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from coordinator.measure.feed import Feed, chunks
from protos.brigade_pb2 import Sampling
from worker.compute.sampling import Sampler
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.model.families import module_of


class Reference:
    """The unsharded model of a folder."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_folder(folder)
        self.model, _ = load_model(folder, model_config={"model_type": module_of(checkpoint.config)})
        self._mask_token = describe(checkpoint).mask_token

    def generate(self, prompt: Sequence[int], num_tokens: int, sampling: Sampling, chunk: int) -> list[int]:
        """Continue the prompt by `num_tokens` tokens, fed in chunks of `chunk` tokens as a session does."""
        cache = make_prompt_cache(self.model)
        sampler = Sampler(sampling)
        tokens = list(prompt)
        windows = chunks(prompt, chunk)
        while len(tokens) < len(prompt) + num_tokens:
            for window in windows:
                logits = self.logits(window, cache)
                mx.eval(logits)
            tokens.append(sampler(logits, [len(tokens)], tokens, [len(tokens)]).to_samples(slot=0)[0].token)
            windows = [tokens[-1:]]
        return tokens[len(prompt) :]

    def read(self, feed: Feed) -> None:
        """Read a feed's windows, one after another."""
        cache, first = make_prompt_cache(self.model), 0
        for window in feed.windows:
            logits = self.rows(window, cache)
            mx.eval(logits)
            feed.hand_over(first, logits)
            first += len(window)

    def logits(self, window: Sequence[int], cache: list[object]) -> mx.array:
        """Feed one window [L]; its last row's logits [1, V] float32."""
        return self.rows(window, cache)[-1:]

    def rows(self, window: Sequence[int], cache: list[object]) -> mx.array:
        """Feed one window [L]; the logits [L, V] float32 of its rows."""
        logits = self.model(mx.array([list(window)]), cache=cache)[0].astype(mx.float32)
        if self._mask_token is not None:
            logits[:, self._mask_token] = -mx.inf  # as in the cluster: no token to say
        return logits

    def time_batch(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, is_wanted: Callable[[], bool]
    ) -> list[list[float]]:
        """When each token of each prompt is there, seconds on the monotonic clock, by mlx-lm's own generators.

        One prompt goes through `generate_step`, several through what `batch_generate` runs on; nothing stops early,
        unless `is_wanted` says so between two steps.
        """
        times: list[list[float]] = [[] for _ in prompts]
        if len(prompts) == 1:
            for _ in takewhile(
                lambda _: is_wanted(), generate_step(mx.array(list(prompts[0])), self.model, max_tokens=num_tokens)
            ):
                times[0].append(time.monotonic())
            return times
        batch = BatchGenerator(self.model, prefill_batch_size=len(prompts), completion_batch_size=len(prompts))
        places = dict(zip(batch.insert(list(map(list, prompts)), [num_tokens] * len(prompts)), times, strict=True))
        while is_wanted() and (responses := batch.next_generated()):
            now = time.monotonic()
            for response in responses:
                places[response.uid].append(now)
        batch.close()
        return times
