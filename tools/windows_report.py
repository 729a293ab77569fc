"""How the numbers of `tools.eval_windows` are shown: docs/windows.md. Measures nothing."""

from collections.abc import Callable

from tools.figures import table
from tools.windows_data import Measured, Score, Setting

COMMAND = "python -m tools.eval_windows --json docs/windows.json --markdown docs/windows.md"
COLUMNS: dict[str, tuple[Callable[[Score], float], str]] = {
    "right, %": (lambda score: score.accuracy, ".1f"),
    "equal to `ar`, %": (lambda score: score.equal, ".1f"),
    "tokens per step": (lambda score: score.tokens_per_step, ".2f"),
    "rows per token": (lambda score: score.rows_per_token, ".2f"),
    "round trips per 100 tokens": (lambda score: score.round_trips, ".1f"),
}

_IN_JSON = (3, 4, 7, 8)  # MASK rows or drafts, of which the page tells nothing
_THRESHOLD = 0.4  # of `diffusion-fast` on the page

_INTRO = """\
# What a window brings

Output of `{command}`

on {machine}, with the bundled model in one process (`--local 0`): {limit} questions of each kind that its training
never saw, answered greedily by every decoder. [windows.json](windows.json) has all figures, the
[model's card](../worker/demo/README.md) the accuracy of many more answers.
"""

_READING = """\
## How to read it

* The text is templated: windows succeed far more often than on a large model's text, and `diffusion-fast` is right more
  often. Compare rows with each other only.
* *Right*: the result for arithmetic, the docstring's example (run) for code, the exact text for facts and stories.
  *Equal*: the share of answers with exactly the tokens of `ar`. *Rows*: what the layers compute, padding included.
* A window pays if its tokens per step exceed (c(2W) + h) / (c(1) + h): c(n) is the time of a step of n rows on all
  nodes together, h that of its hops. A full window has 2W rows, half of them MASK rows. Here W = 16 has to yield
  {local:.1f} tokens per step without a network, and {hops:.1f} with {delay_ms:g} ms of hops.
* On Metal, 16 rows of a 4-bit model cost about 2.75 times one row, 16 to 64 rows about the same, and 5 to 15 are the
  worst choice (measured elsewhere on an M5 Pro).
* Published on real text (a port of WeDLM-8B to MLX by Zimeng Xiong, M3 Max): 1.8, 2.2 and 2.0 tokens per forward at
  W = 8, 16 and 32, and 70 to 71.5 % of 200 GSM8K questions right instead of 78.5 to 80 %. At 2 tokens per step W = 16
  pays where hops take more than {real:.1f} times a step of one row on this CPU, 0.75 times on Metal. The makers
  report 1.97 times the speed of vLLM (WeDLM, arXiv 2512.22737, section 6.4).
* `diffusion` never changes an answer; `diffusion-fast` may, the more often the higher its threshold.

## Drafters

`draft` in the tables below is the [bundled drafter](../worker/demo/drafter/README.md), and its W the number of drafts.
On templates of its training nearly all drafts hold, on others, such as some of the code below, hardly any.
"""

_LATENCY = """\
## Against the latency of a hop

![Tokens per second against the latency of a hop: `ar` falls at once, windows slowly](latency.png)

Made by `python -m tools.plot_latency --json docs/latency.json --plot docs/latency.png`: four prompts to the bundled
model on two nodes. Every step waits for two hops.
"""


def to_markdown(measured: Measured) -> str:
    """The whole page."""
    first = measured.scores[0]
    intro = _INTRO.format(command=COMMAND, machine=measured.machine, limit=first.num_answers)
    delay_ms = max(speed.delay_ms for speed in measured.speeds)
    reading = _READING.format(
        local=measured.break_even(16, 0),
        hops=measured.break_even(16, delay_ms),
        delay_ms=delay_ms,
        real=measured.hops_ms(16, 2.0) / measured.step_ms["1"],
    )
    heading = "## All kinds, each with the same weight\n\n`diffusion-fast` with threshold 0.4."
    means = f"{heading}\n\n{_means(measured)}\n{_chain(measured)}"
    parts = (
        intro,
        _results(measured),
        reading,
        _unknown(measured),
        _LATENCY,
        means,
        _steps(measured),
        _speeds(measured),
    )
    return "\n".join(filter(None, parts))


def _results(measured: Measured) -> str:
    lossless: Setting = ("diffusion", 16, None)
    lists = measured.scores, measured.wanted, measured.chain, measured.drafts, measured.unknown
    exact = [score for scores in lists for score in scores if score.is_checked]
    equal, asked = sum(score.num_equal for score in exact), sum(score.num_answers for score in exact)
    speed = {s.kind: s.tokens_per_step for s in measured.scores if s.setting == lossless}
    mean = measured.mean(lossless, lambda score: score.tokens_per_step)
    ar, _, fast = measured.wanted
    loss = ar.accuracy - fast.accuracy
    lines = [
        ("answers of `ngram`, `diffusion` and `draft` with the tokens of `ar`", f"{equal} of {asked}"),
        *((f"tokens per step on {kind}, `diffusion`, W = 16", f"{speed[kind]:.2f}") for kind in ("arithmetic", "code")),
        ("the same over all kinds", f"{mean:.2f}"),
        (
            f"points that `diffusion-fast` loses on arithmetic, W = 16, threshold 0.4, {ar.num_answers} questions",
            f"{loss:.1f} ({ar.accuracy:.0f} % to {fast.accuracy:.0f} %)",
        ),
    ]
    return "## Results\n\n" + table(("", "measured"), lines)


def _unknown(measured: Measured) -> str:
    """Return what the drafter brings on templates that its training left out, and what drafting costs."""
    if not measured.unknown:
        return ""
    lines = [
        (score.kind, str(score.window), f"{score.tokens_per_step:.2f}", f"{score.rows_per_token:.2f}")
        for score in measured.unknown
        if score.window not in _IN_JSON
    ]
    costs = [f"{cost:.1f} ms for {count} drafts" for count, cost in measured.draft_ms.items()]
    return (
        "On templates that its training left out:\n\n"
        + table(("", "drafts", "tokens per step", "rows per token"), lines)
        + f"\nDrafting adds to a step: {', '.join(costs)}. Its share of a step of two rows\n"
        f"was measured in processor time, at a load average of {measured.load:.0f}.\n"
    )


def _means(measured: Measured) -> str:
    columns = COLUMNS.values()
    lines = [
        (f"`{decoder}`", str(window or ""), *(format(measured.mean(setting, value), spec) for value, spec in columns))
        for setting in measured.settings
        for decoder, window, threshold in [setting]
        if threshold in (None, _THRESHOLD) and window not in _IN_JSON
    ]
    return table(("decoder", "W", *COLUMNS), lines)


def _chain(measured: Measured) -> str:
    exact = [score for score in measured.chain if score.decoder != "diffusion-fast"]
    equal, asked = sum(score.num_equal for score in exact), sum(score.num_answers for score in exact)
    return f"On three processes (`--local 2`) {equal} of {asked} answers of the lossless decoders were equal too.\n"


def _steps(measured: Measured) -> str:
    delay_ms = max(speed.delay_ms for speed in measured.speeds)
    lines = []
    for rows, cost in measured.step_ms.items():
        pays = [f"{measured.break_even(int(rows) // 2, delay):.2f}" for delay in (0, delay_ms)] if int(rows) > 1 else []
        window = str(int(rows) // 2) if pays else ""
        lines.append((rows, f"{cost:.1f}", window, *(pays or ("", ""))))
    header = ("rows", "median, ms", "W", "pays from, tokens per step", f"with {delay_ms:g} ms of hops")
    return (
        "## What a step costs\n\nOne process, one step alone, 128 tokens in the caches; half the rows are MASK "
        "rows.\n\n" + table(header, lines)
    )


def _speeds(measured: Measured) -> str:
    every = [*measured.speeds, *measured.drafted_speeds]
    speeds = sorted((each for each in every if each.window not in _IN_JSON), key=lambda each: each.delay_ms)
    settings = list(dict.fromkeys((each.delay_ms, each.decoder, each.window) for each in speeds))
    lines = []
    for delay_ms, decoder, window in settings:
        size = str(window) if window else "auto" if decoder in ("diffusion", "draft") else ""
        values = [measured.tokens_per_s(kind, decoder, window, delay_ms) for kind in measured.kinds]
        lines.append((f"{delay_ms:g}", f"`{decoder}`", size, *(f"{value:.1f}" for value in values)))
    return (
        "## Tokens per second\n\nWhole answers, prompts included. Each step counts as its rows' time in the table "
        "above, its drafts' time, and *delay*, three hops of 20 ms.\n\n"
        + table(("delay, ms", "decoder", "W", *measured.kinds), lines)
    )
