import fcntl
import os
from pathlib import Path

import pytest

from worker.platform.files import open_locked, require_writable, sync_file


def test_files_are_synced_by_what_reaches_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has a command beyond fsync, which network volumes refuse."""
    calls: list[object] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))

    def command(descriptor: int, number: int) -> None:
        calls.append(number)
        if descriptor == 1:
            raise OSError("not supported")

    with monkeypatch.context() as patch:
        patch.delattr(fcntl, "F_FULLFSYNC", raising=False)
        sync_file(0)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", command)
    sync_file(0)
    sync_file(1)
    assert calls == ["fsync", 51, 51, "fsync"]


def test_a_file_that_could_be_written_is_not_there_yet_and_a_link_to_it_stays(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    require_writable("trace", link)
    assert link.is_symlink() and not target.exists()


def test_a_file_that_another_process_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "journal", fcntl.flock

    def lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    descriptor = open_locked("journal", path, 0o600)
    assert os.path.sameopenfile(descriptor, os.open(path, os.O_RDONLY))
