"""`brigade logs`: what a launched worker has written, over ssh."""

from typing import Annotated

import typer

from coordinator.cli.launch import CONFIG, Config, workers_of
from worker.config import Worker, load_cluster


def logs(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The worker's name in cluster.yaml.")],
    config: Config = CONFIG,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what it writes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 100,
) -> None:
    """The log of a worker that brigade launch has started.

    brigade logs mini -f
    """
    [worker] = workers_of(load_cluster(config), [name])

    from coordinator.cli.run_async import run_async

    run_async(_print_log(worker, lines, is_followed=follow))


async def _print_log(worker: Worker, lines: int, *, is_followed: bool) -> None:
    from coordinator.fleet.launch import values_of
    from coordinator.fleet.ssh import Remote

    assert worker.ssh is not None
    values = values_of(worker.name) | {"lines": str(lines), "follow": "yes" if is_followed else "no"}
    await Remote(worker.name, worker.ssh).output("log", values, _print_line, is_followed=is_followed)


def _print_line(line: str) -> None:
    from worker.process.printable import printable_lines

    print(printable_lines(line), flush=True)
