import errno
import fcntl
import os
from pathlib import Path

import pytest

from coordinator.cli.batch import open_answers
from worker.errors import InputError


def test_another_run_is_told_of_only_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    with open_answers(path), pytest.raises(InputError, match=r"^output: another run writes"), open_answers(path):
        pass

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(InputError, match=r"^output: cannot lock \S+: No locks available$"), open_answers(path):
        pass
