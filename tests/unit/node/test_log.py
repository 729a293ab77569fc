"""A worker's log: its own words, a line for each thing, with its time where it goes into a file."""

import io
import re
from pathlib import Path

from worker.node.log import dated, worker_log

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


TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def test_each_line_of_a_file_begins_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    with path.open("w") as file:
        out = dated(file)
        print("one", "two", file=out)
        print("three\n\nfour", file=out, flush=True)
        print("five", end="", file=out)
        assert out.fileno() == file.fileno() and not out.isatty()
    pattern = rf"{TIME} one two\n{TIME} three\n{TIME} \n{TIME} four\n{TIME} five"
    assert re.fullmatch(pattern, path.read_text())
