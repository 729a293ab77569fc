"""`brigade demo`: one answer on several processes, in windows and one token per step, and what to try next."""

import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from coordinator.cli.generate import Printer
from coordinator.cli.report import print_stats, print_summary, stats_of
from coordinator.cli.wish import Wish, how_it_ended, prepare
from coordinator.cluster.open import open_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.cluster.runner import generate
from coordinator.decoding.decode import Decode
from coordinator.sessions.answer import Answer

_NEXT = ("generate", "--local", "2", "--stats", "Tell me a story about a fox.")


async def run_demo(options: ClusterOptions, wish: Wish) -> None:
    """The prompt's answer to standard output; all that is said of it to standard error."""
    say(f"> {wish.prompt}\n")
    task = await prepare(wish, options)
    stream = task.stream()
    async with open_cluster(options, task.checkpoint, task.spec, options.context) as cluster:
        with Printer(stream) as emit:
            answer = await generate(
                cluster.chain, task.request, when_lost=cluster.reopen, text=stream, emit=emit, traced=True
            )
        print_summary(answer, how_it_ended(task, answer, stream))
        chain, again = cluster.chain, replace(task.request, decode=Decode("ar"))
        print_stats(answer, chain.plan, answer.waterfall(), with_legend=True)
        stepwise = await generate(chain, again, when_lost=cluster.reopen, text=task.stream())
    say(f"\n{compare(answer, stepwise)}\n\nTry next: {our_command()} {shlex.join(_NEXT)}")


def compare(windows: Answer, stepwise: Answer) -> str:
    """Both ways to the same answer, a line each."""
    lines = [
        f"{name:<19}{len(answer.tokens)} tokens in {answer.num_steps} steps, "
        f"{stats_of(answer)['tokens_per_s'] or 0:.1f} tok/s"
        for name, answer in (("in windows", windows), ("one token per step", stepwise))
    ]
    return "\n".join(lines) + (": the same tokens" if windows.tokens == stepwise.tokens else ": OTHER TOKENS")


def our_command() -> str:
    """How this very program can be called from here."""
    if shutil.which("brigade"):
        return "brigade"
    program = Path(sys.argv[0])
    if program.name != "brigade":
        return "python -m coordinator"
    try:
        return str(program.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(program)
