"""The `brigade` command; also python -m coordinator."""

from worker.platform.interrupts import end_when_interrupted

end_when_interrupted()  # before anything else is imported

from typing import NoReturn  # noqa: E402

from coordinator.cli.app import app  # noqa: E402
from worker.platform.run import run_command  # noqa: E402


def main() -> NoReturn:
    run_command(app)


if __name__ == "__main__":
    main()
