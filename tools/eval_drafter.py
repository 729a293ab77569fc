"""How many drafts of the bundled model's drafter hold: `python -m tools.eval_drafter [--draft-model DIR] [--limit 6]`.

Questions are those that training never saw, by kind; those marked `new` have answers of a template that the drafter
never saw either. In one process, so speeds are without hops (`tools.bench_hops --draft-model` has those with).
"""

import time
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from coordinator.cli.run import run_async
from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import generate_once
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tools.demo_data import mix
from tools.demo_data.rows import encode_turn
from tools.demo_data.tokenizer import ENDOFTEXT, IM_END
from tools.demo_data.turn import Turn
from worker.model.checkpoint import DEMO
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_AR = Decode("ar")
_DECODERS = {"3 drafts": Decode("draft", num_drafts=3), "7": Decode("draft", num_drafts=7),
             "15": Decode("draft", num_drafts=15), "auto": Decode("draft")}  # fmt: skip
_MOST_TOKENS = 200


def main(
    draft_model: Annotated[str, typer.Option(help="A folder, as for `brigade generate`.")] = str(DEMO / "drafter"),
    limit: Annotated[int, typer.Option(min=1, help="Questions of each kind.")] = 6,
) -> None:
    """Print tokens per step, and the speed against `ar`, by kind of question."""
    run_async(_measure(cluster_options(None, "demo", 0, draft_model=draft_model), limit))


@dataclass
class Sum:
    """Of all answers of one decoder to one kind of question."""

    num_tokens: int = 0
    num_steps: int = 0
    seconds: float = 0.0


async def _measure(options: ClusterOptions, limit: int) -> None:
    checkpoint, spec = await read_model(options.model, options.draft_model)
    table = Table(title=f"tokens per step (speed against `ar`) on {machine_name()}", title_justify="left")
    for column in ("questions", *_DECODERS):
        table.add_column(column, justify="right")
    async with open_chain(replace(options, context=spec.context), checkpoint) as chain:
        for kind in mix.MEASURED:
            turns = mix.held_out(kind, 100 * limit)
            for is_new in (False, True):
                if chosen := [turn for turn in turns if turn.is_new_to_drafter == is_new][:limit]:
                    table.add_row(f"{kind}, new" if is_new else kind, *await _row(chain, chosen))
    Console().print(table)


async def _row(chain: Chain, turns: list[Turn]) -> list[str]:
    sums: dict[str, Sum] = {}
    text = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for turn in turns:
        prompt, expected = tuple(encode_turn(text, turn)[0]), None
        for name, decode in {"ar": _AR, **_DECODERS}.items():
            request = Request(prompt, _MOST_TOKENS, Sampling(), decode, eos=frozenset({IM_END, ENDOFTEXT}))
            began = time.monotonic()
            answer = await generate_once(chain, request)
            each = sums.setdefault(name, Sum())
            each.seconds += time.monotonic() - began
            each.num_tokens += len(answer.tokens)
            each.num_steps += answer.usage.num_steps
            expected = expected or answer.tokens
            assert answer.tokens == expected, f"{name} changed an answer"
    ar_s = sums["ar"].seconds
    return [
        f"{sums[name].num_tokens / sums[name].num_steps:.2f} ({ar_s / sums[name].seconds:.2f} x)" for name in _DECODERS
    ]


if __name__ == "__main__":
    run_command(main)
