"""What the second turn of a long conversation costs on a model with recurrent layers whose template drops thoughts.

python -m tools.bench_turns [--tokens 16000] [--local 1]

A tiny random qwen3_5 model. The second turn follows the first one on a server, and comes first on another: the answers
have to be equal, and only tokens behind the deepest snapshot may be fed again. Exits with 1 otherwise.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx2
import typer

from tools import random_model
from tools.model_types.make import make_type
from tools.serve_client import brigade, long_text
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
_VOCAB = 2048
_ANSWER = 32  # tokens
_MOST_FED = 100  # tokens of the second turn: its question and what stands around it

Json = dict[str, Any]


def main(
    tokens: Annotated[int, typer.Option(min=600, help="Of the first turn's question, about.")] = 16_000,
    local: Annotated[int, typer.Option(min=0, help="Workers.")] = 1,
) -> int:
    """Measure a second turn behind the first one, and by itself."""
    question = {"role": "user", "content": long_text(tokens)}
    with tempfile.TemporaryDirectory() as folder:
        context = 2 * tokens + 1000
        model = make_type(
            Path(folder) / "model", "qwen3_5", changes={"vocab_size": _VOCAB, "max_position_embeddings": context}
        )
        random_model.add_tokenizer(model, _TEMPLATE, context)
        flags = ("--model", model, "--local", str(local))
        with brigade(*flags) as server, httpx2.Client(base_url=server.url, timeout=600.0) as client:
            first, _ = _answer(client, [question])
            turns = [question, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now?"}]
            second, second_s = _answer(client, turns)
        with brigade(*flags) as server, httpx2.Client(base_url=server.url, timeout=600.0) as client:
            fresh, fresh_s = _answer(client, turns)
    asked, reused = second["usage"]["prompt_tokens"], _reused(second)
    is_equal = second["choices"][0]["message"] == fresh["choices"][0]["message"]
    print(
        f"{machine_name()}: first turn {first['usage']['prompt_tokens']} tokens, second turn {asked} tokens, of which "
        f"{asked - reused} fed; {second_s:.2f} s, {fresh_s:.2f} s by itself ({fresh_s / second_s:.1f} x); "
        f"answers {'equal' if is_equal else 'DIFFER'}"
    )
    return int(not is_equal or asked - reused > _MOST_FED or _reused(fresh) > 0)


def _answer(client: httpx2.Client, messages: list[Json]) -> tuple[Json, float]:
    began = time.monotonic()
    body = {"messages": messages, "max_tokens": _ANSWER, "temperature": 0.8, "seed": 7}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status()
    return answer.json(), time.monotonic() - began


def _reused(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


if __name__ == "__main__":
    run_command(main)
