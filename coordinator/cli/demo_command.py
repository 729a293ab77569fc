"""`brigade demo`: its flags, and what they amount to."""

import typer

from coordinator.cli import flags
from coordinator.cli.generate_command import read_prompt
from coordinator.cli.refusals import require_one_prompt
from coordinator.cluster.options import cluster_options

DEMO_PROMPT = "Tom has 48 apples. He buys 27 more and then gives away 30. How many apples does Tom have?"


def demo(
    ctx: typer.Context,
    text: flags.Text = None,
    prompt: flags.Prompt = None,
    local: flags.DemoLocal = 2,
    max_tokens: flags.MaxTokens = 256,
    as_json: flags.Json = False,
) -> None:
    """Worker processes and this coordinator on loopback, the bundled model, one answer, in windows and without.

    brigade demo

    With more workers: brigade demo --local 5
    """
    if text is not None or prompt is not None:
        require_one_prompt(ctx)
    options = cluster_options(None, "demo", local, None, None)

    from coordinator.cluster.templates import TEMPLATES

    TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.demo import run_demo
    from coordinator.cli.generate import run_generate
    from coordinator.cli.run_async import run_async
    from coordinator.cli.wish import Wish

    asked = DEMO_PROMPT if text is None and prompt is None else read_prompt(text, prompt)
    wish = Wish(prompt=asked, max_tokens=max_tokens, as_json=as_json)
    run_async(run_generate(options, wish) if as_json else run_demo(options, wish))
