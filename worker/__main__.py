"""python -m worker: the same command as `brigade worker`."""

from worker.cli import worker
from worker.process.run import run_command

if __name__ == "__main__":
    run_command(worker)
