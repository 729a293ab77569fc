"""How the numbers of `tools.eval_windows` are shown: docs/windows.md and its picture. Measures nothing."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.windows_data import Measured, Score, Setting

COMMAND = "python -m tools.eval_windows --json docs/windows.json --markdown docs/windows.md --plot docs/windows.png"
COLORS = {"ar": "black", "ngram": "tab:green", "diffusion": "tab:blue", "diffusion-fast": "tab:red"}
_LABEL_STEPS = 2.2  # tokens per step that a label is wide
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
decoder, greedily. All answers come from `coordinator.cluster.runner`, the code behind `brigade generate`, with
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
* It does not pay for short answers, for text that the model cannot foresee, or on a fast network in front of nodes that
  compute rather than wait for memory. `ngram` costs little and brings little here: these answers hardly repeat.
* `diffusion` never changes an answer. `diffusion-fast` may, for fewer steps, and more often the higher its threshold. A
  MASK d places ahead has to stay 0.02 d nats below the threshold, so 0.2, 0.4 and 0.8 reach 10, 20 and 40 places: MASK
  rows beyond those cost as much and are filled only where nothing nearer is sure.
"""


def to_markdown(measured: Measured, plot: Path | None) -> str:
    """The whole page; `plot` is the picture's file, next to it."""
    first = measured.scores[0]
    intro = _INTRO.format(command=COMMAND, machine=measured.machine, limit=first.num_answers)
    facts = next(score for score in measured.scores if score.kind == "facts")
    delay_ms = max(speed.delay_ms for speed in measured.speeds)
    reading = _READING.format(
        fact_tokens=facts.num_tokens / facts.num_answers,
        local=measured.break_even(16, 0),
        hops=measured.break_even(16, delay_ms),
        delay_ms=delay_ms,
    )
    picture = f"![Accuracy against tokens per step]({plot.name})\n" if plot else ""
    kinds = [f"## {kind.capitalize()}\n\n{_scores(measured, kind)}" for kind in measured.kinds]
    sections = [
        intro, _goals(measured), reading, picture, f"## All kinds, each with the same weight\n\n{_means(measured)}",
        *kinds, _chain(measured), _steps(measured), _speeds(measured), _auto(measured),
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


def write_plot(measured: Measured, path: Path) -> None:
    """PNG, accuracy against tokens per step: a row per kind, a column per rule by which tokens are taken."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    thresholds = list(dict.fromkeys(score.threshold for score in measured.scores))
    lowest = min(90.0, *(score.accuracy for score in measured.scores))
    shape = len(measured.kinds), len(thresholds)
    figure, grid = pyplot.subplots(
        *shape, figsize=(12, 8), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for kind, panels in zip(measured.kinds, grid, strict=True):
        for threshold, axes in zip(thresholds, panels, strict=True):
            _panel(axes, [s for s in measured.scores if (s.kind, s.threshold) == (kind, threshold)])
        panels[0].set_ylabel(f"{kind}\nright answers, %")
    for threshold, axes in zip(thresholds, grid[0], strict=True):
        axes.set_title(
            "the tokens of ar" if threshold is None else f"diffusion-fast, threshold {threshold:g} nats", fontsize=11
        )
    for axes in grid[-1]:
        axes.set(xlabel="tokens per step", ylim=(lowest - 5, 104), xlim=(0, None))
    handles = {
        label: handle for axes in grid[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    figure.suptitle("Accuracy against tokens per step; the numbers are W, the window's MASK rows")
    figure.savefig(path, dpi=110)


def _panel(axes: Any, scores: Sequence[Score]) -> None:
    for decoder in dict.fromkeys(score.decoder for score in scores):
        line = [score for score in scores if score.decoder == decoder]
        points = [(score.tokens_per_step, score.accuracy) for score in line]
        size = 8 if decoder == "ar" else 5  # a rim shows where another covers it
        axes.plot(*zip(*points, strict=True), "o-", color=COLORS[decoder], label=decoder, markersize=size, linewidth=1)
        for point, text in _window_labels(line):
            axes.annotate(text, point, (-3, 5), textcoords="offset points", fontsize=8)
    axes.grid(alpha=0.25)


def _window_labels(line: Sequence[Score]) -> list[tuple[tuple[float, float], str]]:
    """Where to write each window of a decoder; those of points that nearly meet are written at the first."""
    labels: list[tuple[tuple[float, float], str]] = []
    for score in line:
        point, text = (score.tokens_per_step, score.accuracy), str(score.window or "")
        before, written = labels[-1] if labels else (point, "")
        if written and point[1] == before[1] and point[0] - before[0] < _LABEL_STEPS * (1 + written.count(",")):
            point, text = before, f"{labels.pop()[1]}, {text}"
        labels.append((point, text))
    return labels
