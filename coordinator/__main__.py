"""The `brigade` command; also python -m coordinator."""

import signal
from typing import NoReturn

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported: an end, not a traceback

from coordinator.cli.app import app  # noqa: E402 - not before the line above
from worker.process.run import run_command  # noqa: E402


def main() -> NoReturn:
    run_command(app)


if __name__ == "__main__":
    main()
