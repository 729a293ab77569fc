"""The exit code of a process that a signal reaches as it ends, or while its output is not read."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

ENDING = """
import sys, time
from worker.platform.interrupts import end_when_interrupted

class Late:
    def __del__(self):
        print("ending", flush=True)
        for _ in range(100):
            time.sleep(0.01)

end_when_interrupted()
late = Late()
sys.exit(7)
"""


def test_a_signal_while_python_ends_changes_no_exit_code() -> None:
    with subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ending\n"
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        assert process.wait(30) == 7


UNREAD = """
import os, sys
from worker.platform.interrupts import end_when_interrupted

end_when_interrupted()
sys.stdout.write("buffered")
os.set_blocking(1, False)
try:
    while True:
        os.write(1, b"x")
except BlockingIOError:
    os.set_blocking(1, True)
os.write(2, b"full")
"""


@pytest.mark.parametrize("open_both", [os.pipe, pty.openpty])
def test_a_signal_ends_a_process_that_flushes_at_its_end_what_is_not_read(
    open_both: Callable[[], tuple[int, int]],
) -> None:
    ours, theirs = open_both()
    command = [sys.executable, "-c", UNREAD]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stderr and process.stderr.read(4) == b"full"
        time.sleep(0.5)  # it flushes
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(10) == 130
        finally:
            process.kill()
    os.close(ours)
    os.close(theirs)
