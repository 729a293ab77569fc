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
            await journal.keep(each)


def known(path: Path) -> KnownTokens:
    return asyncio.run(_known(path))


async def _known(path: Path) -> KnownTokens:
    async with JournalFile(path) as journal:
        assert journal.found is not None
        return journal.found.known


def test_what_is_kept_is_found_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    asyncio.run(keep(path, piece(5, 6), piece(7)))
    asyncio.run(keep(path, piece(8), piece(9, end="stop")))
    assert known(path) == KnownTokens(tuple(map(Token, (5, 6, 7, 8, 9))), (), "stop")


def test_a_piece_is_in_the_file_once_it_is_kept(tmp_path: Path) -> None:
    """Whatever a killed process has printed, its journal has."""
    asyncio.run(_keep_five(tmp_path))


async def _keep_five(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with JournalFile(path) as journal:
        await journal.begin(HEADER)
        for token in range(5):
            before = path.stat().st_size
            await journal.keep(piece(token))
            assert path.stat().st_size > before


def test_a_step_is_in_the_file_before_it_is_shown(tmp_path: Path) -> None:
    """So a process that is killed between the two repeats nothing when it goes on, and lacks that step at most."""
    shown: list[tuple[str, int]] = []
    path = tmp_path / "journal"

    async def show_five() -> None:
        async with JournalFile(path) as journal:
            await journal.begin(HEADER)
            for token in range(5):
                each = Output(str(token), [Token(token)], 0)
                await journal.keep(each, lambda text: shown.append((text, path.stat().st_size)))

    asyncio.run(show_five())
    data = path.read_bytes()
    for count, (text, size) in enumerate(shown, start=1):
        found = read_journal(data[:size])
        assert found is not None and len(found.known.tokens) == count == int(text) + 1


def test_an_interrupt_waits_for_the_step_that_is_being_shown(tmp_path: Path) -> None:
    """What is printed behind it must not come before it, and the file has what was shown."""
    asyncio.run(_interrupt_while_shown(tmp_path / "journal"))


async def _interrupt_while_shown(path: Path) -> None:
    told, began, may_go_on = [], threading.Event(), threading.Event()

    def show(text: str) -> None:
        began.set()
        may_go_on.wait(10.0)
        told.append(text)

    async with JournalFile(path) as journal:
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
    asyncio.run(_keep_many(tmp_path, monkeypatch))


async def _keep_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    path, fsync = tmp_path / "journal", os.fsync
    async with JournalFile(path) as journal:
        await journal.begin(HEADER)
        monkeypatch.setattr(journal_file.os, "fsync", lambda file: (fsync(file), synced.append(path.stat().st_size)))
        for token in range(50):
            await journal.keep(piece(token))
    assert len(synced) < 25 and synced[-1] == path.stat().st_size


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    asyncio.run(keep(tmp_path / "journal", piece(5)))
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


def test_a_record_that_was_not_written_to_its_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    asyncio.run(keep(path, piece(5), piece(6)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    asyncio.run(keep(path, piece(6)))
    assert path.read_bytes() == whole


def test_a_file_of_another_kind_or_a_damaged_one_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    asyncio.run(keep(path, piece(5), piece(6)))
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 4
    for content in (b"my notes", bytes(damaged)):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"expected a journal|is damaged"):
            known(path)
        assert path.read_bytes() == content


def test_a_file_that_is_too_long_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="expected at most 268435456 bytes, found 1099511627776"):
        known(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "no folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = path / "journal"
    with pytest.raises(InputError, match=r"is no file|Is a directory|No such file"):
        known(path)


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
    path.touch()
    asyncio.run(nothing(path))
    assert path.exists() and not holds_something(path)


def test_a_full_disk_ends_the_answer_with_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_keep_on_a_full_disk(tmp_path, monkeypatch))


async def _keep_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    async with JournalFile(tmp_path / "journal") as journal:
        await journal.begin(HEADER)
        with monkeypatch.context() as patch:
            patch.setattr(journal_file.os, "write", full)
            with pytest.raises(InputError, match="journal: No space left on device"):
                await journal.keep(piece(5))
