"""python -m worker: the same command as `brigade worker`."""

from worker.platform.interrupts import end_when_interrupted

end_when_interrupted()  # before the slow imports

from worker.cli import worker  # noqa: E402
from worker.platform.run import run_command  # noqa: E402

if __name__ == "__main__":
    run_command(worker)
