"""Hold `/openapi.json` against a server: schemathesis asks what the document allows, and what it does not.

schemathesis is no dependency of this project: `pip install schemathesis`, here or beside it.

python -m tools.check_openapi [--python ENVIRONMENT/bin/python] [--seconds 100]

No answer may be a 5xx; every status, content type, header and body has to be as the document says, and so has every
event of a stream. A route that was never answered with 200 fails as well: then nothing was tried. Exits with 1 where
any of this does not hold.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from tools.serve_client import brigade
from worker.errors import InputError
from worker.platform.run import run_command

_HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
_CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method",
)  # fmt: skip
_SERVER = ("--context", "512", "--max-tokens", "8")  # answers that are soon over
_LATER_S = 60.0  # than it was told to end


def main(
    python: Annotated[Path, typer.Option(help="Of the environment that schemathesis is in.")] = Path(sys.executable),
    seconds: Annotated[int, typer.Option(min=5, help="Of asking.")] = 100,
    model: Annotated[str, typer.Option(help="As for `brigade serve`.")] = "demo",
    local: Annotated[int, typer.Option(min=0, help="Workers.")] = 0,
) -> None:
    """Ask a server of its own whatever its document allows."""
    if subprocess.run([python, "-c", "import schemathesis"], capture_output=True).returncode:
        raise InputError("python", f"schemathesis is not installed there: {python} -m pip install schemathesis")
    flags = ("--model", model, "--local", str(local), "--served-model-name", "served", *_SERVER)
    with brigade(*flags) as server, tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts.json")
        counts.write_text("{}", encoding="utf-8")
        code = _ask(python, server.url, seconds, counts, folder)
        unanswered = _table(json.loads(counts.read_text(encoding="utf-8")))
    for label in unanswered:
        print(f"FAILED: {label} was never answered with 200")
    raise typer.Exit(1 if code or unanswered else 0)


def _ask(python: Path, url: str, seconds: int, counts: Path, folder: str) -> int:
    command: list[str | Path] = [
        python.absolute(), "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", ",".join(_CHECKS),
        "--max-time", str(seconds), "--phases", "coverage,fuzzing", "--continue-on-failure", "--request-timeout", "30",
        "--workers", "1", "--no-color", "--warnings", "off", "--max-examples", "10000", "--seed", "1",
    ]  # fmt: skip
    # One worker: two of them have been seen to disturb each other inside hypothesis.
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": str(_HOOKS),
        "BRIGADE_MODEL": "served",
        "BRIGADE_COUNTS": str(counts),
    }
    return subprocess.run(command, cwd=folder, env=environment, timeout=seconds + _LATER_S).returncode


def _table(counts: dict[str, int]) -> list[str]:
    """Print how often every route answered with which status; those that never did with 200."""
    by_label: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for told, count in sorted(counts.items()):
        label, _, status = told.rpartition(": ")
        by_label[label][status] = count
    for label, statuses in by_label.items():
        print(f"{label:40} " + ", ".join(f"{count} x {status}" for status, count in statuses.items()))
    return [label for label, statuses in by_label.items() if "200" not in statuses]


if __name__ == "__main__":
    run_command(main)
