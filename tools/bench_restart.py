"""The first token of a prompt on fresh servers and after a restart of all nodes, with prefixes kept on their disks.

python -m tools.bench_restart [--model demo] [--prompt 1600] [--rounds 3] [--local 1]

In each round a server starts with an empty disk, answers a long prompt and ends; then it starts again, with its
workers, and answers the same prompt. Both answer another prompt of that length before, which compiles. Ratios are of
medians of one run. Exits with 1 if an answer differs.
"""

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
import uvloop
import yaml

from tools.serve_client import Outcome, brigade, long_text, whole_stream
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_TOKENS = 8  # of an answer


def main(
    model: Annotated[str, typer.Option(help="A folder, a hub repository, or `demo`.")] = "demo",
    prompt: Annotated[int, typer.Option(min=1100, help="Tokens, about.")] = 1600,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    local: Annotated[int, typer.Option(min=0, help="Workers.")] = 1,
) -> int:
    """Compare times to the first token."""
    return int(not uvloop.run(_compare(model, prompt, rounds, local)))


async def _compare(model: str, prompt: int, rounds: int, local: int) -> bool:
    fresh: list[Outcome] = []
    again: list[Outcome] = []
    num_bytes = 0
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder  # of the servers, too
            config = Path(folder, "cluster.yaml")
            _write(config, {"model": model, "cache_disk": "50GiB"})
            for found in (fresh, again):
                with brigade("--config", config, "--local", str(local), "--context", str(2 * prompt)) as server:
                    async with server.client() as client:
                        for text in (long_text(prompt, 9 - number), long_text(prompt, number)):
                            body = {"prompt": text, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
                            outcome = await whole_stream(client, body)
                        found.append(outcome)
            num_bytes = _bytes_in(folder)
    is_equal = [each.text for each in fresh] == [each.text for each in again]
    fresh_s, again_s = (median(each.first_s for each in found) for found in (fresh, again))
    print(
        f"{machine_name()}, {model}, {local + 1} nodes, prompts of about {prompt} tokens, medians of {rounds}: first "
        f"token {fresh_s:.3f} s fresh, {again_s:.3f} s after a restart ({again_s / fresh_s:.2f} x); "
        f"{num_bytes / 2**20:.0f} MiB on disk; answers {'equal' if is_equal else 'DIFFER'}"
    )
    return is_equal


def _write(path: Path, keys: dict[str, str]) -> None:
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")


def _bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*.rows"))


if __name__ == "__main__":
    run_command(main)
