"""What a process says into a file has its times; what it says elsewhere stays as it is."""

import os
import re
import sys
from pathlib import Path

import pytest

from worker.node.log import dated

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


def test_a_terminal_a_pipe_and_what_has_no_descriptor_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    pipe, terminal = os.pipe(), os.openpty()
    for descriptor in (pipe[1], terminal[1]):
        with os.fdopen(descriptor, "w") as out:
            assert dated(out) is out
    assert dated(sys.stderr) is sys.stderr
    os.close(pipe[0])
    os.close(terminal[0])
