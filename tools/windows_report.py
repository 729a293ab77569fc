"""How the numbers of `tools.eval_windows` are shown: docs/windows.md. Measures nothing."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coordinator.decoding.decode import Decode
from tools.windows_data import Measured, Score, Setting

COMMAND = "python -m tools.eval_windows --json docs/windows.json --markdown docs/windows.md"
COLUMNS: dict[str, tuple[Callable[[Score], float], str]] = {
    "right, %": (lambda score: score.accuracy, ".1f"),
    "equal to `ar`, %": (lambda score: score.equal, ".1f"),
    "tokens per step": (lambda score: score.tokens_per_step, ".2f"),
    "rows per token": (lambda score: score.rows_per_token, ".2f"),
    "prefix cacheability": (lambda score: score.cacheability, ".3f"),
    "round trips per 100 tokens": (lambda score: score.round_trips, ".1f"),
}

_INTRO = """\
# What a window brings

Output of

    {command}

on {machine}, with the bundled model: {limit} questions of each kind that its training never saw, each answered by every
decoder, greedily. All answers come from `coordinator.engine.engine`, the code behind `brigade generate`, with
everything in one process (`--local 0`); three processes follow further down. Counts depend on the model and the decoder
only, times on this machine. The accuracy of many more answers, one token at a time by mlx-lm, is in the
[model's card](../worker/demo/README.md).
"""

_READING = """\
## How to read it

* The text is templated: the model's answers follow a few patterns, so its windows hold far more often than a large
  model's will. Take the relations between rows from here, not their size, and not the accuracy of `diffusion-fast`.
* *Right* is the result for arithmetic, the docstring's example (run) for code, the exact text for facts and stories.
  *Equal* is the share of answers that have the tokens of `ar`, every one of them.
* *Tokens per step* counts the prompt's last step too: short answers (facts: {fact_tokens:.0f} tokens) cannot get far.
  *Rows* are what the layers compute, MASK rows and padding included, of the prompt only the last row. *Prefix
  cacheability* is WeDLM's Eq. 4, tokens by rows; 1 for `ar`. A *round trip* is a step that the next one waits for.
* A window pays where its tokens per step exceed (c(2W) + h) / (c(1) + h): c(n) is what a step of n rows costs on all
  nodes together, h what its hops cost. A full window has 2W rows: as many known tokens or drafts as MASK rows.
* On this CPU rows cost nearly in proportion: W = 16 has to yield {local:.1f} tokens per step with no network, and
  {hops:.1f} with {delay_ms:g} ms of hops. The slower the network, the better a window is, and the wider it may be.
* With a 4-bit model on Metal 16 rows cost about 2.75 times a single one, 16 to 64 rows about the same, and 5 to 15 rows
  are the worst place to be (measured elsewhere on an M5 Pro; nothing on this page is from a Mac): on one node such a
  window would pay from about 3 tokens per step.
* W = 16 means frames of 32 rows once drafts hold: whatever 32 rows cost is what such a step costs.
* W = 32 makes more tokens per step than 16 on every kind of text here, and more per second on arithmetic and stories
  once hops are slow: templated text can be told thirty places ahead. A port of WeDLM-8B to MLX (Zimeng Xiong, *Porting
  WeDLM to MLX*, an M3 Max) found the opposite: 1.8, 2.2 and 2.0 tokens per forward at W = 8, 16 and 32. On real text
  drafts end after a few tokens, and more rows only cost. Code and facts show the same here: W = 32 is the slower one.
* That port is what is published of real text on a Mac: about 2 tokens per step, and 70 to 71.5 % of 200 GSM8K questions
  right where one token at a time had 78.5 to 80 %. The makers report 1.97 times the speed of vLLM at 92.3 %, 3.2 times
  at 79.7 % (WeDLM, arXiv 2512.22737, section 6.4). At 2 tokens per step a window pays where hops take more than
  c(2W) - 2 c(1): for W = 16 with 4-bit weights on Metal 0.75 times a step of one row, on this CPU {real:.1f} times one.
* It does not pay for short answers, for text that the model cannot foresee, or on a fast network in front of nodes that
  compute rather than wait for memory. `ngram` costs little and brings little here: these answers hardly repeat.
* `diffusion` never changes an answer. `diffusion-fast` may, for fewer steps, and more often the higher its threshold. A
  MASK d places ahead has to stay 0.02 d nats below the threshold, so 0.2, 0.4 and 0.8 reach 10, 20 and 40 places: MASK
  rows beyond those cost as much and are filled only where nothing nearer is sure.
"""

_LATENCY = """\
## Against the latency of a hop

![Tokens per second against the latency of a hop: `ar` falls at once, windows slowly](latency.png)

Measured by `python -m tools.plot_latency --json docs/latency.json --plot docs/latency.png`: four prompts to the
bundled model on two nodes, with a proxy between them that holds everything back. Of several rounds the fastest counts,
as other work on the machine only slows it down. A step waits for two hops, whatever it yields: the further apart the
nodes are, the more its tokens count.
"""

_RULES = """\
## Thresholds of `diffusion-fast`

W = 16. A MASK is filled where its entropy and so much per place ahead stay below the threshold. The defaults, 0.4 and
0.02, are those of WeDLM's own engine and of its evaluation; 0.3 and 0.01 are those of the MLX port. They differ in
reach: 20 places here, 30 there, both more than a window of 16. Here both pairs make the same tokens. Means over all
kinds, each with the same weight, from a later run than the other tables.
"""


def to_markdown(measured: Measured) -> str:
    """The whole page."""
    first = measured.scores[0]
    intro = _INTRO.format(command=COMMAND, machine=measured.machine, limit=first.num_answers)
    facts = next(score for score in measured.scores if score.kind == "facts")
    delay_ms = max(speed.delay_ms for speed in measured.speeds)
    reading = _READING.format(
        fact_tokens=facts.num_tokens / facts.num_answers,
        local=measured.break_even(16, 0),
        hops=measured.break_even(16, delay_ms),
        delay_ms=delay_ms,
        real=measured.hops_ms(16, 2.0) / measured.step_ms["1"],
    )
    kinds = [f"## {kind.capitalize()}\n\n{_scores(measured, kind)}" for kind in measured.kinds]
    sections = [
        intro, _goals(measured), reading, _LATENCY, f"## All kinds, each with the same weight\n\n{_means(measured)}",
        *kinds, _rules(measured), _chain(measured), _steps(measured), _speeds(measured), _auto(measured),
    ]  # fmt: skip
    return "\n".join(section for section in sections if section)


def _goals(measured: Measured) -> str:
    lossless: Setting = ("diffusion", 16, None)
    exact = [score for score in [*measured.scores, *measured.wanted, *measured.chain] if score.is_checked]
    equal, asked = sum(score.num_equal for score in exact), sum(score.num_answers for score in exact)
    speed = {s.kind: s.tokens_per_step for s in measured.scores if s.setting == lossless}
    mean = measured.mean(lossless, lambda score: score.tokens_per_step)
    ar, _, fast = measured.wanted
    loss = ar.accuracy - fast.accuracy
    rows = [
        ("`ngram` and `diffusion` give the tokens of `ar`", "100 %", f"{equal} of {asked} answers", equal == asked),
        *(
            (f"tokens per step on {kind}, `diffusion`, W = 16", "at least 4", f"{speed[kind]:.2f}", speed[kind] >= 4)
            for kind in ("arithmetic", "code")
        ),
        ("the same over all kinds", "at least 3", f"{mean:.2f}", mean >= 3),
        (
            f"arithmetic that `diffusion-fast` loses, W = 16, threshold 0.4, {ar.num_answers} questions",
            "at most 2 points",
            f"{loss:.1f} ({ar.accuracy:.0f} % to {fast.accuracy:.0f} %)",
            loss <= 2,
        ),
    ]
    lines = [(what, goal, found, "yes" if met else "**no**") for what, goal, found, met in rows]
    return "## What was wanted\n\n" + table(("", "wanted", "measured", "met"), lines)


def _scores(measured: Measured, kind: str) -> str:
    lines = [
        (*_names(score.setting), *(format(value(score), spec) for value, spec in COLUMNS.values()))
        for score in measured.scores
        if score.kind == kind
    ]
    return table(("decoder", "W", "threshold", *COLUMNS), lines)


def _means(measured: Measured) -> str:
    lines = [
        (*_names(setting), *(format(measured.mean(setting, value), spec) for value, spec in COLUMNS.values()))
        for setting in measured.settings
    ]
    return table(("decoder", "W", "threshold", *COLUMNS), lines)


def _rules(measured: Measured) -> str:
    if not measured.rules:
        return ""
    lines = []
    for rule in dict.fromkeys((score.threshold, score.penalty) for score in measured.rules):
        found = [score for score in measured.rules if (score.threshold, score.penalty) == rule]
        means = (sum(value(score) for score in found) / len(found) for value, _ in COLUMNS.values())
        threshold, penalty = rule[0], Decode.position_penalty if rule[1] is None else rule[1]
        cells = (format(mean, spec) for mean, (_, spec) in zip(means, COLUMNS.values(), strict=True))
        lines.append((f"{threshold:g}", f"{penalty:g}", *cells))
    return f"{_RULES}\n{table(('threshold', 'penalty', *COLUMNS), lines)}"


def _chain(measured: Measured) -> str:
    lines = []
    for score in measured.chain:
        values = (score.equal, score.tokens_per_step, score.accuracy)
        lines.append((score.kind, *_names(score.setting), *(f"{value:.2f}" for value in values)))
    text = (
        f"## Three processes\n\n`--local 2`, {measured.chain[0].num_answers} questions of each kind, compared with "
        "`ar` on the same three processes.\n\n"
    )
    return text + table(("kind", "decoder", "W", "threshold", "equal to `ar`, %", "tokens per step", "right, %"), lines)


def _steps(measured: Measured) -> str:
    delay_ms = max(speed.delay_ms for speed in measured.speeds)
    lines = []
    for rows, cost in measured.step_ms.items():
        pays = [f"{measured.break_even(int(rows) // 2, delay):.2f}" for delay in (0, delay_ms)] if int(rows) > 1 else []
        window = str(int(rows) // 2) if pays else ""
        lines.append((rows, f"{cost:.1f}", f"{cost / measured.step_ms['1']:.2f}", window, *(pays or ("", ""))))
    header = (
        "rows",
        "median, ms",
        "c(rows) / c(1)",
        "W",
        "pays from, tokens per step",
        f"with {delay_ms:g} ms of hops",
    )
    return (
        "## What a step costs\n\nOne process, one step alone, 128 tokens in the caches; half the rows are tokens whose "
        "next token is sampled, half are MASK rows.\n\n" + table(header, lines)
    )


def _speeds(measured: Measured) -> str:
    settings = list(dict.fromkeys((s.delay_ms, s.decoder, s.window) for s in measured.speeds))
    lines = []
    for delay_ms, decoder, window in settings:
        shown = str(window) if window else "auto" if decoder == "diffusion" else ""
        values = [measured.tokens_per_s(kind, decoder, window, delay_ms) for kind in measured.kinds]
        lines.append((f"{delay_ms:g}", f"`{decoder}`", shown, *(f"{value:.1f}" for value in values)))
    return (
        "## Tokens per second\n\nWhole answers, prompts included: every step runs, and counts as what its rows cost "
        "in the table above and *delay*, three hops of 20 ms. `diffusion-fast` with threshold 0.4.\n\n"
        + table(("delay, ms", "decoder", "W", *measured.kinds), lines)
    )


def _auto(measured: Measured) -> str:
    autos = [speed for speed in measured.speeds if speed.picked]
    lines = []
    for speed in autos:
        picked = ", ".join(f"{window} ({count}×)" for window, count in speed.picked.items())
        fixed = {s.window: s.tokens_per_s for s in measured.speeds if _is_rival(s, speed)}
        best = max(fixed, key=lambda window: fixed[window])
        lines.append((f"{speed.delay_ms:g}", speed.kind, picked, str(best), f"{speed.tokens_per_s / fixed[best]:.0%}"))
    header = ("delay, ms", "kind", "W that `auto` had chosen after each answer", "best fixed W", "speed against it")
    return (
        "## What `--window auto` picks\n\nFrom the same run; it begins to learn anew with each kind. 0 stands for no "
        "window.\n\n" + table(header, lines)
    )


def _is_rival(one: Any, auto: Any) -> bool:
    return (one.kind, one.delay_ms, one.decoder) == (auto.kind, auto.delay_ms, auto.decoder) and one.window is not None


def _names(setting: Setting) -> tuple[str, str, str]:
    decoder, window, threshold = setting
    return f"`{decoder}`", str(window or ""), "" if threshold is None else f"{threshold:g}"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its columns aligned."""
    cells = [tuple(header), tuple("---" for _ in header), *map(tuple, lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    rows = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "".join(f"| {row} |\n" for row in rows)
