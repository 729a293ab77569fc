"""The exit code of a process that a signal reaches at any moment."""

import signal
import subprocess
import sys

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
