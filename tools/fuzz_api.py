"""Requests that schemathesis makes from the server's own description, while streams run that have to stay as they are.

python -m tools.fuzz_api [--cases 10000] [--streams 4] [--environments FOLDER]

Schemathesis is installed in an environment of its own. No answer may have a status from 500, and every stream beside it
has to be whole and to say what it said alone. Exits with 1 where that does not hold.
"""

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from tools.check_clients import installed
from tools.load_serve import story
from tools.serve_client import brigade, print_failures, stream
from worker.platform.run import run_command
from worker.platform.tasks import cancel_all

_PACKAGE = "schemathesis"
_PART_S = 120  # of one run; runs go on with other seeds until there were enough cases
_TOKENS = 64
_SHOWN = 3000  # characters of a run that found something
_CASES = re.compile(r"(\d[\d,]*) generated")


def main(
    cases: Annotated[int, typer.Option(min=1, help="The least number of requests.")] = 10_000,
    streams: Annotated[int, typer.Option(min=1, help="Beside them, one after the other each.")] = 4,
    environments: Annotated[Path | None, typer.Option(help="Keep the installation in this folder.")] = None,
) -> int:
    """Fuzz the API of a server of this command's own."""
    with tempfile.TemporaryDirectory() as folder:
        command = installed(_PACKAGE, (environments or Path(folder)).resolve(), is_npm=False) / "schemathesis"
        return print_failures(uvloop.run(_fuzz(command, Path(folder), cases, streams)))


async def _fuzz(command: Path, folder: Path, cases: int, streams: int) -> list[str]:
    failures: list[str] = []
    num_streams = 0
    with brigade("--model", "demo", "--local", "1") as server:
        async with server.client() as client:
            alone = [(await stream(client, story(number, _TOKENS))).text for number in range(streams)]

            async def repeat(number: int) -> None:
                nonlocal num_streams
                while True:
                    found = await stream(client, story(number, _TOKENS))
                    num_streams += 1
                    if not found.is_whole or found.text != alone[number]:
                        failures.append(f"stream {number}: status {found.status}, {found.text!r}")

            beside = [asyncio.create_task(repeat(number)) for number in range(streams)]
            num_cases, seed = 0, 0
            while num_cases < cases and not failures and not any(task.done() for task in beside):
                seed += 1
                printed = await _run(command, folder, server.url, seed)
                found = _CASES.search(printed)
                if found is None or "Server error" in printed:
                    failures.append(f"seed {seed}: {printed[-_SHOWN:]}")
                num_cases += int(found[1].replace(",", "")) if found else 0
                print(f"{num_cases} requests, {num_streams} streams, {len(failures)} failures", flush=True)
            failures += [repr(each) for each in await cancel_all(*beside) if isinstance(each, Exception)]
    return failures


async def _run(command: Path, folder: Path, url: str, seed: int) -> str:
    """Return what one run of schemathesis printed, which leaves its findings in the folder."""
    arguments = (
        *("run", f"{url}/openapi.json", "--phases", "coverage,fuzzing", "--checks", "not_a_server_error"),
        *("--workers", "4", "--seed", str(seed), "--max-time", str(_PART_S), "--request-timeout", "60"),
        *("--suppress-health-check", "all", "--continue-on-failure", "--no-color"),
    )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        str(command), *arguments, cwd=folder, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    return printed.decode(errors="replace")


if __name__ == "__main__":
    run_command(main)
