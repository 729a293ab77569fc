"""Run lm-eval's tasks against a chain: a model class of lm-eval's that asks a `brigade serve` which runs.

lm-eval is no dependency of this project: `pip install lm-eval` beside it. Then, with the task files of a folder:

    brigade serve --model demo --local 2
    python -m tools.lm_eval_model --tasks capitals --include-path tools/lm_eval_tasks

Log-likelihoods come from `/v1/score`, texts from `/v1/completions`. What follows nothing has no likelihood: an empty
context, and the first token of a text, are conditioned on `--prefix-token`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from coordinator.resident.scores import windows_of

Json = dict[str, Any]


class Served:
    """The server's answers, one request after another."""

    def __init__(self, url: str, prefix: int) -> None:
        self._client = httpx2.Client(base_url=url.rstrip("/") + "/", timeout=600.0)
        self._prefix = prefix
        self._most = int(self._client.get("v1/models").raise_for_status().json()["data"][0]["max_model_len"]) - 1

    def score(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log-probability of a continuation, and whether it is what the likeliest tokens would be."""
        if not context:
            return self._score([self._prefix], self._tokens(continuation))
        body = {"prompt": context, "continuations": [continuation]}
        return _of(self._ask("v1/score", body))

    def roll(self, text: str) -> float:
        """The log-probability of a whole text, in windows of the model's context if it is longer."""
        tokens = [self._prefix, *self._tokens(text)]
        windows = windows_of(len(tokens), self._most)
        return sum(self._score(tokens[w.begin : w.scored], tokens[w.scored : w.end])[0] for w in windows)

    def generate(self, context: str, asked: Json) -> str:
        """What follows a text, up to where one of `until` begins."""
        until = asked.get("until") or []
        body = {
            "prompt": context,
            "max_tokens": asked.get("max_gen_toks", 256),
            "temperature": asked.get("temperature", 0.0) if asked.get("do_sample") else 0.0,
            "stop": [until] if isinstance(until, str) else until,
        }
        return str(self._ask("v1/completions", body)["choices"][0]["text"])

    def _score(self, prompt: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        return _of(self._ask("v1/score", {"prompt_tokens": prompt, "continuations": [continuation]}))

    def _tokens(self, text: str) -> list[int]:
        return list(self._ask("tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])

    def _ask(self, path: str, body: Json) -> Json:
        return dict(self._client.post(path, json=body).raise_for_status().json())


def make_model(url: str, prefix: int) -> Any:
    """A model as lm-eval takes it."""
    from lm_eval.api.model import LM

    served = Served(url, prefix)

    class Brigade(LM):
        """Asks the server."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [served.score(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return [served.roll(*request.args) for request in requests]

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return [served.generate(*request.args) for request in requests]

    return Brigade()


def main() -> None:
    """Print the results of the tasks as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:9338")
    parser.add_argument("--tasks", required=True, help="names, with commas between them")
    parser.add_argument("--include-path", type=Path, help="a folder with task files")
    parser.add_argument("--limit", type=int, help="the most requests of a task")
    parser.add_argument("--prefix-token", type=int, default=0, help="token id that a text is conditioned on")
    given = parser.parse_args()

    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(given.include_path) if given.include_path else None)
    model = make_model(given.url, given.prefix_token)
    found = simple_evaluate(model=model, tasks=given.tasks.split(","), task_manager=manager, limit=given.limit)
    print(json.dumps(found["results"], indent=1, default=str))


def _of(answer: Json) -> tuple[float, bool]:
    [score] = answer["scores"]
    return float(score["logprob"]), bool(score["is_greedy"])


if __name__ == "__main__":
    main()
