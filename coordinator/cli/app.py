"""The `brigade` command line. MLX is imported only once a command runs."""

import platform
from typing import Annotated

import typer

from coordinator.cli.batch import batch
from coordinator.cli.bench import bench
from coordinator.cli.bridge import bridge
from coordinator.cli.cache import cache
from coordinator.cli.calibrate import calibrate
from coordinator.cli.chat import chat
from coordinator.cli.demo import demo
from coordinator.cli.doctor import doctor, smoke
from coordinator.cli.eval import eval
from coordinator.cli.generate import generate
from coordinator.cli.keys import keys
from coordinator.cli.launch import launch, logs
from coordinator.cli.nodes import init, nodes
from coordinator.cli.plan import plan
from coordinator.cli.quantize import quantize
from coordinator.cli.run import as_command
from coordinator.cli.score import score
from coordinator.cli.serve import serve
from coordinator.cli.status import status
from coordinator.cli.verify import verify
from worker.cli import worker
from worker.platform.installation import version_of
from worker.platform.run import App

ASK, SET_UP, LOOK = "Ask a model", "Set up a cluster", "See how it does"

app = App(no_args_is_help=True)
for panel, commands in (
    (ASK, (demo, generate, serve, chat, batch, bridge, score)),
    (SET_UP, (init, nodes, launch, logs, worker, plan)),
    (LOOK, (status, doctor, smoke, verify, eval, calibrate, bench)),
    ("Prepare a model", (quantize,)),
):
    for command in commands:
        app.command(rich_help_panel=panel)(as_command(command))
app.add_typer(keys, name="keys", rich_help_panel=SET_UP)
app.add_typer(cache, name="cache", rich_help_panel=SET_UP)


def print_version(is_wanted: bool) -> None:
    """Print the versions that a bug report needs."""
    if is_wanted:
        others = ", ".join(f"{package} {version_of(package)}" for package in ("mlx", "mlx-lm"))
        print(f"brigade {version_of('brigade')} ({others}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Run one language model on several Macs, with the tokens that it would have on one."""
