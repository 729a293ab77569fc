"""What a worker says of its callers is in its own words, a line for each thing."""

import io

from worker.node.log import worker_log

NAME = "max\nworker mini: drained\r\x1b[2J\u202e" + 5000 * "x"


def test_no_caller_writes_lines_of_its_own_or_steers_the_terminal() -> None:
    out = io.StringIO()
    log = worker_log("mini", out)
    log.warning("refused %s: %s", f"to load for coordinator {NAME}", "is shutting down")
    log.info("joined the chain of coordinator %s", NAME)
    log.warning("%s", "100 %s")
    *lines, percent = out.getvalue().split("\n")[:-1]
    starts = "refused to load for coordinator", "joined the chain of coordinator"
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(f"worker mini: {start} max worker mini: drained")
        assert line.isprintable() and len(line) < 2100
    assert percent == "worker mini: 100 %s", "a caller's percent sign is no format"
