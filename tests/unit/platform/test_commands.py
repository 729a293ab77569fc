"""Commands of the system never hold up or break whoever asks."""

import sys

import pytest

from worker.platform import commands as commands_module
from worker.platform.commands import Commands


def test_what_a_command_prints_is_taken_whatever_its_exit_code() -> None:
    ask = Commands()
    assert ask(sys.executable, "-c", "print('masked'); raise SystemExit(1)") == "masked\n"
    assert ask(sys.executable, "-c", r"import sys; sys.stdout.buffer.write(b'\xff')") == "�"
    assert ask(sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))") == "''\n", "it reads no input"
    assert len(ask(sys.executable, "-c", "print('x' * 2**21)")) == 2**20
    assert ask("no-such-command-anywhere") == "" and ask.unread == []


def test_a_command_that_takes_too_long_is_ended_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_module, "WITHIN_S", 0.1)
    ask = Commands()
    assert ask(sys.executable, "-c", "import time; time.sleep(60)") == ""
    assert ask.unread == [sys.executable.rpartition("/")[2]]
