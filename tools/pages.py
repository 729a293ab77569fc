"""Which measured pages and pictures of docs/ are older than the code that they measure: `make pages`.

Dates are those of commits, so a page looks newer after an edit of its text; stored figures (JSON) stand for their page.
"""

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tools.figures import table
from worker.platform.run import run_command

_ROOT = Path(__file__).parents[1]
_DECODING = "coordinator/decoding", "coordinator/sessions", "worker/compute", "worker/memory"
_CHAIN = *_DECODING, "coordinator/engine", "coordinator/cluster", "worker/node"
_GPUS = "brigade bench --config cluster.yaml --model FOLDER --layers 12,12 --concurrency 1,8,16 -p 64 -g 128"
_BENCH = "brigade bench --local 1 --concurrency 1,4,8,16 -p 64 -g 96 -n 3 --json --plot docs/bench.png"
_CANVAS = "python -m tools.eval_canvas --json docs/canvas.json --markdown docs/canvas.md"
_FAULTS = "python -m tools.faults --json docs/faults.json --markdown docs/faults.md"
_FEED = "python -m tools.bench_feed --layers 4 --rounds 5 --folder /dev/shm --mbit 1000"
_LATENCY = "python -m tools.plot_latency --json docs/latency.json --plot docs/latency.png"
_MODELS = "python -m tools.models_table --json docs/models.json --markdown docs/models.md"
_WINDOWS = "python -m tools.eval_windows --json docs/windows.json --markdown docs/windows.md"


@dataclass(frozen=True)
class Page:
    """A page or picture of docs/, the command that makes it, the code that it measures, and where its figures are."""

    name: str
    command: str
    code: tuple[str, ...]
    figures: str = ""  # the file of docs/ that stores them


PAGES = (
    Page("bench.md", _BENCH, (*_CHAIN, "coordinator/bench"), "bench.json"),
    Page("bench.png", _BENCH, (*_CHAIN, "coordinator/bench")),
    Page("canvas.md", _CANVAS, _CHAIN, "canvas.json"),
    Page("clients.md", "python -m tools.check_clients --markdown docs/clients.md", ("coordinator/api",)),
    Page("failover.md", "brigade bench --failover -n 1 --model FOLDER", (*_CHAIN, "coordinator/planning")),
    Page("faults.md", _FAULTS, ("coordinator", "worker", "tools/faults"), "faults.json"),
    Page("feed.md", _FEED, ("coordinator/cluster", "worker/node")),
    Page("fits.md", "python -m tools.plan_table", ("coordinator/planning", "worker/model", "tools/published")),
    Page("gpu.md", _GPUS, _CHAIN),
    Page("kill.svg", "python -m tools.faults --picture docs/kill.svg", (*_CHAIN, "coordinator/planning")),
    Page("kv.json", "python -m tools.eval_kv --json docs/kv.json", ("worker/compute", "worker/memory")),
    Page("latency.png", _LATENCY, _CHAIN, "latency.json"),
    Page("models.md", _MODELS, ("worker/compute", "worker/memory", "worker/model", "tools/model_types"), "models.json"),
    Page("overhead.md", "python -m tools.bench_overhead --rounds 4", _CHAIN),
    Page("quality.md", "python -m tools.eval_quantised", ("coordinator/quality", "coordinator/decoding")),
    Page("serve.md", "python -m tools.bench_serve", (*_CHAIN, "coordinator/api")),
    Page("tls.md", "python -m tools.bench_tls", ("worker/node",)),
    Page("windows.md", _WINDOWS, _DECODING, "windows.json"),
)


def main(root: Annotated[Path, typer.Option(help="The repository.")] = _ROOT) -> None:
    """Show when each page and its code were committed, and print the commands that make the older pages anew."""
    lines, commands = [], []
    for page in PAGES:
        made, changed = _committed(root, f"docs/{page.figures or page.name}"), _committed(root, *page.code)
        commands += [page.command] if made < changed else []
        dates = [f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" for at in (made, changed)]
        lines.append((page.name, *dates, "older than its code" if made < changed else "up to date"))
    print(table(("page", "committed", "its code", "so it is"), lines))
    print(*dict.fromkeys(commands), sep="\n")


def _committed(root: Path, *paths: str) -> int:
    """Return when one of these last changed in a commit, in seconds since 1970; 0 if there is no such commit."""
    command = ["git", "log", "-1", "--format=%ct", "--", *paths]
    return int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout or 0)


if __name__ == "__main__":
    run_command(main)
