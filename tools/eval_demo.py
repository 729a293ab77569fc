"""Measure a demo model on questions that its training never saw: `python -m tools.eval_demo --model worker/demo`.

Answers come from mlx-lm's batched greedy decoding, the fast way to many of them; Brigade's own decoders are measured
by `tools.eval_windows`.
"""

import argparse
import ast
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import batch_generate, load
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from tools import figures
from tools.demo_data import mix
from tools.demo_data.turn import Turn
from worker.memory.history import common_prefix

DEFAULT_MODEL = Path(__file__).parents[1] / "worker" / "demo"
MAX_TOKENS = 400
PROBE_EVERY = 8
FENCE = "```"


class Output(NamedTuple):
    """What the model answered, greedily; `tokens` with the closing token where it has one."""

    text: str
    tokens: list[int]
    has_ended: bool


def last_line(turn: Turn, output: Output) -> bool:
    """The last line is the expected one, such as `Answer: 37`."""
    return output.has_ended and output.text.strip().split("\n")[-1] == turn.answer.split("\n")[-1]


def exact(turn: Turn, output: Output) -> bool:
    return output.has_ended and output.text == turn.answer


def ends_well(turn: Turn, output: Output) -> bool:
    return output.has_ended and output.text.endswith("The end.")


def is_python(turn: Turn, output: Output) -> bool:
    """The answer is one code block that parses."""
    try:
        return output.has_ended and bool(ast.parse(code_of(output.text)).body)
    except (SyntaxError, ValueError):
        return False


def example_holds(turn: Turn, output: Output) -> bool:
    """The code's docstring example gives what it claims, run in a process of its own."""
    if not is_python(turn, output) or ">>>" not in output.text:
        return False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.py")
        file.write_text(code_of(output.text) + "\n")
        try:
            done = subprocess.run([sys.executable, "-I", "-m", "doctest", str(file)], capture_output=True, timeout=10)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def code_of(text: str) -> str:
    """The inside of a Markdown code block.

    Raises:
        ValueError: the text is no single code block.
    """
    if not (text.startswith(f"{FENCE}python\n") and text.endswith(f"\n{FENCE}")):
        raise ValueError(f"expected one Python code block, got {text[:40]!r}")
    return text[len(FENCE) + len("python\n") : -len(FENCE) - 1]


Check = Callable[[Turn, Output], bool]
CHECKS: dict[str, dict[str, Check]] = {
    "arithmetic": {"right result": last_line, "exact text": exact},
    "code": {"valid Python": is_python, "example holds": example_holds, "exact text": exact},
    "facts": {"exact text": exact},
    "story": {"ends properly": ends_well, "exact text": exact},
}


def encode(tokenizer: Any, earlier: list[Turn], turn: Turn) -> list[int]:
    """Frame a question as the next one of a conversation."""
    messages = [m for t in earlier for m in (_message("user", t.prompt), _message("assistant", t.answer))]
    return tokenizer.apply_chat_template([*messages, _message("user", turn.prompt)], add_generation_prompt=True)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def answer_all(model: nn.Module, tokenizer: Any, prompts: list[list[int]]) -> list[Output]:
    """Answer all prompts by greedy autoregressive decoding."""
    response = batch_generate(model, tokenizer, prompts, max_tokens=MAX_TOKENS, return_token_ids=True)
    outputs = []
    for tokens in response.token_ids or []:
        words = [token for token in tokens if token not in tokenizer.eos_token_ids]
        has_ended = len(tokens) < MAX_TOKENS
        outputs.append(Output(tokenizer.decode(words), words + [tokenizer.eos_token_id] * has_ended, has_ended))
    return outputs


def best(model: nn.Module, rows: list[int], cache: list[Any], keep: int) -> list[int]:
    """Run rows behind the cache, keep the first `keep` of them there, and return each row's most likely token."""
    picks = model(mx.array([rows]), cache=cache)[0].argmax(-1).tolist()
    trim_prompt_cache(cache, len(rows) - keep)
    return picks


def agreed_prefix(model: nn.Module, prompt: list[int], answer: list[int], window: list[int]) -> float:
    """Mean number of leading MASK rows that name the answer's next tokens, tried at every `PROBE_EVERY`th token."""
    cache, fed, lengths = make_prompt_cache(model), prompt, []
    for start in range(0, len(answer), PROBE_EVERY):
        picks = best(model, fed + window, cache, len(fed))
        lengths.append(common_prefix(picks[len(fed) :], answer[start:]))
        fed = answer[start : start + PROBE_EVERY]
    return sum(lengths) / len(lengths)


def measure(model: nn.Module, tokenizer: Any, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one kind: the share that passes each check, and for the first `args.probes` answers the MASK rows."""
    start, turns, rng = time.perf_counter(), mix.held_out(kind, args.limit), random.Random(2)
    prompts = [encode(tokenizer, [mix.sample(rng) for _ in range(args.earlier)], turn) for turn in turns]
    outputs = answer_all(model, tokenizer, prompts)
    window = [args.mask_id] * args.window
    agreed = [
        agreed_prefix(model, prompt, output.tokens, window)
        for prompt, output in zip(prompts[: args.probes], outputs, strict=False)
    ]
    checks = {
        name: round(100 * fmean(check(*pair) for pair in zip(turns, outputs, strict=True)), 1)
        for name, check in CHECKS[kind].items()
    }
    failed = [(turn, output) for turn, output in zip(turns, outputs, strict=True) if not exact(turn, output)]
    return {
        "kind": kind,
        "items": len(turns),
        "prompt_tokens": round(sum(map(len, prompts)) / len(prompts)),
        "checks": checks,
        "agreed_prefix": round(sum(agreed) / len(agreed), 2),
        "seconds": round(time.perf_counter() - start, 1),
        "failures": [{"prompt": t.prompt, "expected": t.answer, "got": o.text} for t, o in failed[: args.show]],
    }


def table(results: list[dict[str, Any]], window: int) -> str:
    """Lay the results out as a Markdown table."""
    header = ("kind", "items", "prompt tokens", "held-out accuracy, greedy", f"agreed prefix of {window}")
    lines = []
    for r in results:
        checks = ", ".join(f"{name} {share} %" for name, share in r["checks"].items())
        lines.append((r["kind"], str(r["items"]), str(r["prompt_tokens"]), checks, f"{r['agreed_prefix']:.2f}"))
    return figures.table(header, lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--limit", type=int, default=200, help="questions per kind")
    parser.add_argument("--probes", type=int, default=50, help="answers per kind for which the MASK rows are measured")
    parser.add_argument("--window", type=int, default=16, help="MASK rows per window")
    parser.add_argument("--earlier", type=int, default=0, help="earlier questions of the same conversation")
    parser.add_argument("--show", type=int, default=0, help="wrong answers per kind to print")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    model, tokenizer = load(str(args.model))[:2]
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)  # bfloat16 has no fast path there
    args.mask_id = json.loads((args.model / "config.json").read_text())["mask_token_id"]
    results = []
    for kind in mix.MEASURED:
        results.append(measure(model, tokenizer, kind, args))
        print(f"{kind}: {results[-1]['seconds']} s", file=sys.stderr, flush=True)
    print(table(results, args.window), end="")
    for failure in (f for r in results for f in r["failures"]):
        print("\n{prompt}\n  expected: {expected!r}\n  got:      {got!r}".format(**failure))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
