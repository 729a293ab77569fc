"""The `brigade` command; also python -m coordinator."""

from typing import NoReturn

from coordinator.cli import app
from worker.run import run_command


def main() -> NoReturn:
    run_command(app)


if __name__ == "__main__":
    main()
