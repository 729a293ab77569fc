"""A journal's file: what is kept is there whatever happens to the process, and it is nobody else's meanwhile."""

import asyncio
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator.engine import journal_file
from coordinator.engine.journal_file import JournalFile, holds_something
from coordinator.sessions.journal import Header, read_journal
from coordinator.sessions.output import KnownTokens, Output, Token
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Contents, Fingerprint
from worker.errors import InputError

HEADER = Header("demo", Fingerprint(config="c"), Contents(marks=b"1234"), Request((1, 2), 99), True)


def piece(*tokens: int, end: str | None = None) -> Output:
    return Output("", [Token(token) for token in tokens], 0, end)


async def keep(path: Path, *pieces: Output) -> None:
    """Go on with the file, or begin it, and add these."""
    async with JournalFile(path) as journal:
        if journal.found is None:
            await journal.begin(HEADER)
        for each in pieces:
            await journal.keep(each, print)


def known(path: Path) -> KnownTokens:
    async def read() -> KnownTokens:
        async with JournalFile(path) as journal:
            assert journal.found is not None
            return journal.found.known

    return asyncio.run(read())


def test_what_is_kept_is_found_and_goes_on_behind_the_last_whole_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    asyncio.run(keep(path, piece(5, 6), piece(7)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    asyncio.run(keep(path, piece(7)))
    assert path.read_bytes() == whole
    asyncio.run(keep(path, piece(8), piece(9, end="length")))
    assert known(path) == KnownTokens(tuple(map(Token, (5, 6, 7, 8, 9))), (), "length")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "only its owner may read it"


def test_a_step_is_in_the_file_before_it_is_shown_and_once_it_is_kept(tmp_path: Path) -> None:
    """So a process that is killed between the two repeats nothing when it goes on, and lacks that step at most."""
    shown: list[tuple[str, int]] = []
    path = tmp_path / "journal"

    async def show_five() -> None:
        async with JournalFile(path) as journal:
            await journal.begin(HEADER)
            for token in range(5):
                each, before = Output(str(token), [Token(token)], 0), path.stat().st_size
                await journal.keep(each, lambda text: shown.append((text, path.stat().st_size)))
                assert path.stat().st_size > before

    asyncio.run(show_five())
    data = path.read_bytes()
    for count, (text, size) in enumerate(shown, start=1):
        found = read_journal(data[:size])
        assert found is not None and len(found.known.tokens) == count == int(text) + 1
    assert len(shown) == 5


async def test_an_interrupt_waits_for_the_step_that_is_being_shown(tmp_path: Path) -> None:
    """What is printed behind it must not come before it, and the file has what was shown."""
    told, began, may_go_on = [], threading.Event(), threading.Event()

    def show(text: str) -> None:
        began.set()
        may_go_on.wait(10.0)
        told.append(text)

    async with JournalFile(tmp_path / "journal") as journal:
        await journal.begin(HEADER)
        keeping = asyncio.create_task(journal.keep(Output("a", [Token(1)], 0), show))
        await asyncio.to_thread(began.wait, 10.0)
        keeping.cancel()
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(may_go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await keeping
        assert told == ["a"]


def test_many_pieces_wait_for_the_disk_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has all of them before the disk has answered for the first."""
    synced: list[int] = []
    path, fsync = tmp_path / "journal", os.fsync

    def note(file: int) -> None:
        fsync(file)
        synced.append(path.stat().st_size)

    async def keep_many() -> None:
        async with JournalFile(path) as journal:
            await journal.begin(HEADER)
            monkeypatch.setattr(journal_file, "sync_file", note)
            for token in range(50):
                await journal.keep(piece(token), print)

    asyncio.run(keep_many())
    assert len(synced) < 25 and synced[-1] == path.stat().st_size


def test_what_is_no_file_or_a_file_that_is_too_long_is_refused_unread(tmp_path: Path) -> None:
    path, pipe, long = tmp_path / "journal", tmp_path / "pipe", tmp_path / "long"
    path.mkdir()
    os.mkfifo(pipe)
    for odd in (path, pipe, tmp_path / "none" / "journal"):
        with pytest.raises(InputError, match=r"expected a file|Is a directory|No such file"):
            known(odd)
    with long.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="expected at most 268435456 bytes, found 1099511627776"):
        known(long)


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    asyncio.run(keep(path, piece(5)))
    program = (
        f"import asyncio, sys; from tests.unit.engine.test_journal_file import *; print(known(Path({str(path)!r})))"
    )

    async def meanwhile() -> str:
        async with JournalFile(path):
            return (await asyncio.to_thread(other)).stderr

    def other() -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert f"{path} is in use by another process" in asyncio.run(meanwhile())
    assert known(path).tokens == (Token(5),)


def test_a_request_of_which_nothing_came_leaves_no_file_of_its_own(tmp_path: Path) -> None:
    async def nothing(path: Path) -> None:
        async with JournalFile(path):
            pass

    path = tmp_path / "journal"
    asyncio.run(nothing(path))
    assert not path.exists() and not holds_something(path)
    path.symlink_to(tmp_path / "target")
    asyncio.run(nothing(path))
    assert path.is_symlink() and not path.exists()
    path.touch()
    asyncio.run(nothing(path))
    assert path.exists() and not holds_something(path)


async def test_a_full_disk_ends_the_answer_with_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    async with JournalFile(tmp_path / "journal") as journal:
        await journal.begin(HEADER)
        with monkeypatch.context() as patch:
            patch.setattr(journal_file.os, "write", full)
            with pytest.raises(InputError, match="journal: No space left on device"):
                await journal.keep(piece(5), print)


@pytest.mark.parametrize("is_left_first", [False, True])
def test_a_disk_that_tells_its_failure_once_and_behind_the_last_piece_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left_first: bool
) -> None:
    """As Linux does: the next fsync of the file succeeds."""
    has_begun, may_fail = threading.Event(), threading.Event()

    def fail(file: int) -> None:
        if not has_begun.is_set():
            has_begun.set()
            may_fail.wait(10.0)
            raise OSError(5, "Input/output error")

    async def work() -> None:
        async with JournalFile(tmp_path / "journal") as journal:
            await journal.begin(HEADER)
            monkeypatch.setattr(journal_file, "sync_file", fail)
            await journal.keep(piece(5, end="stop"), print)
            await asyncio.to_thread(has_begun.wait, 10.0)
            if is_left_first:
                asyncio.get_running_loop().call_soon(may_fail.set)
            else:
                may_fail.set()
                await asyncio.sleep(0.01)

    with pytest.raises(InputError, match="Input/output error"):
        asyncio.run(work())
