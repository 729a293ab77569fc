"""Processes that end while a call that they gave up is still in the middle of MLX."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ATTEMPTS = 4  # finalising Python with such a call under way aborts about every third

COMMAND = """
import asyncio
import sys
import mlx.core as mx
from worker.errors import ModelError
from worker.platform.threads import MlxThread
from worker.platform.run import run_command

def compute():
    array = mx.random.normal((300, 300))
    while True:
        for _ in range(20):
            array = mx.tanh(array @ array)
        mx.eval(array)

async def give_up():
    thread = MlxThread()
    await asyncio.wait([asyncio.ensure_future(thread.run(compute))], timeout=0.3)
    thread.close(0.1)

def command() -> int:
    asyncio.run(give_up())
    print("done")
    if flags:
        raise ModelError("torn")
    return 7

sys.argv, flags = sys.argv[:1], sys.argv[1:]
run_command(command)
"""


def start(*arguments: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", COMMAND, *arguments]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_process_ends_as_it_should_whatever_a_call_that_was_given_up_is_doing() -> None:
    running = [start() for _ in range(ATTEMPTS)]
    assert {(*process.communicate(timeout=60), process.returncode) for process in running} == {("done\n", "", 7)}


def test_it_does_so_where_nobody_reads_what_it_prints() -> None:
    with open("/dev/full", "w") as full:
        process = start("fail", stdout=full.fileno())
        assert (process.communicate(timeout=60)[1], process.wait()) == ("error: torn\n", 2)
