"""`brigade demo`: one answer on several processes, in windows and one token per step."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.generate import (
    GenerateOptions,
    how_it_ended,
    prepare,
    print_outputs,
    read_prompt,
    require_one_prompt,
    run_generate,
)
from coordinator.cli.report import print_stats, print_summary, stats_of
from coordinator.cli.run import TakeFlags
from coordinator.cli.show import Printer
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.progress import say
from coordinator.decoding.decode_options import Decode
from coordinator.engine.bounded import TEMPLATES
from coordinator.sessions.output import Answer
from coordinator.sessions.request import RequestSpec
from worker.platform.text import counted

DEMO_PROMPT = "Tom has 48 apples. He buys 27 more and then gives away 30. How many apples does Tom have?"
_NEXT = ("generate", "--local", "2", "--stats", "Tell me a story about a fox.")


def demo(
    prompt: Annotated[flags.PromptFlags, TakeFlags("text", "prompt")],
    *,
    local: Annotated[
        int,
        # the bundled model has eight layers, of which this process takes one
        typer.Option(min=1, max=7, help="How many workers to start here.", rich_help_panel=flags.CLUSTER),
    ] = 2,
    max_tokens: flags.MaxTokens = 256,
    as_json: flags.JsonFlag = False,
) -> Coroutine[Any, Any, None]:
    """Start workers on this machine and answer a prompt with the bundled model, in windows and token by token.

    brigade demo

    With more workers: brigade demo --local 5
    """
    require_one_prompt(prompt, is_text=True, may_lack=True)
    options = cluster_options(None, "demo", local)
    TEMPLATES.start()  # in parallel to imports that take a second
    given = read_prompt(prompt)
    asked = GenerateOptions(
        DEMO_PROMPT if given is None else given,
        spec=RequestSpec((), max_tokens),
        output=flags.OutputFlags(as_json=as_json),
    )
    return run_generate(options, asked) if as_json else run_demo(options, asked)


async def run_demo(options: ClusterOptions, asked: GenerateOptions) -> None:
    """Print the answer to standard output; statistics of both ways and a command to try next to standard error."""
    from coordinator.engine.engine import open_engine

    say(f"> {asked.prompt}\n")
    inputs, request, _ = await prepare(asked, options)
    async with open_engine(inputs, options, max_waiting=1) as engine:
        answer = Answer()
        with Printer(answer) as printer:
            await print_outputs(engine.generate(request, traced=True), printer, answer)
        answer.statuses = await engine.chain.statuses()
        print_summary(answer, how_it_ended(request, answer, inputs.spec.context))
        print_stats(answer, engine.chain.plan, answer.waterfall(), with_legend=True)
        stepwise = await engine.answer(replace(request, decode=Decode("ar")))
    say(f"\n{compare(answer, stepwise)}\n\nTry next: {_our_command()} {shlex.join(_NEXT)}")


def compare(windows: Answer, stepwise: Answer) -> str:
    """Return a line for each of the two ways to the same answer."""
    lines = [
        f"{name:<19}{counted(len(answer.tokens), 'token')} in {counted(answer.usage.num_steps, 'step')}, "
        f"{stats_of(answer)['tokens_per_s'] or 0:.1f} tok/s"
        for name, answer in (("in windows", windows), ("one token per step", stepwise))
    ]
    return "\n".join(lines) + (": the same tokens" if windows.tokens == stepwise.tokens else ": OTHER TOKENS")


def _our_command() -> str:
    """Return a command by which this program can be called from here."""
    if shutil.which("brigade"):
        return "brigade"
    program = Path(sys.argv[0])
    if program.name != "brigade":
        return "python -m coordinator"
    try:
        return str(program.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(program)
