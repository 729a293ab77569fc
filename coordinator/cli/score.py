"""`brigade score`: its flags, and what they amount to."""

import sys
from typing import Annotated

import typer

from coordinator.cli import flags
from coordinator.cli.chosen import chosen_cluster
from worker.errors import InputError

File = Annotated[
    str, typer.Argument(metavar="FILE", show_default=False, help="A text in UTF-8; `-`, or none: standard input.")
]


def score(
    ctx: typer.Context,
    file: File = "-",
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    as_json: flags.Json = False,
) -> None:
    """How likely a text is to the model: the log-probability of its tokens, and its perplexity.

    The first token follows nothing and has no score. Each other one is scored by all tokens before it, if the text has
    less than --context tokens. A longer text is scored in windows of that length, each of which begins in the middle of
    the one before: its first half was scored there, and the tokens of its second half are scored by all before them in
    the window, which are half of --context at least.

    brigade score --model demo --local 2 README.md
    """
    options = chosen_cluster(ctx)
    text = _read(file)

    from coordinator.cli.run_async import run_async
    from coordinator.doors.score import run_score

    run_async(run_score(options, text, as_json=as_json))


def _read(file: str) -> str:
    """Raises InputError for what is not there, or no text."""
    try:
        if file == "-":
            return sys.stdin.buffer.read().decode()
        with open(file, encoding="utf-8", newline="") as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise InputError("", f"{file}: expected UTF-8 text, found other bytes at {error.start}") from error
    except OSError as error:
        raise InputError("", f"{file} cannot be read: {error.strerror}") from error
