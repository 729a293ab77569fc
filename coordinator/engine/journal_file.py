"""A journal's file: locked, read once, then only appended to."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from coordinator.sessions.journal import MOST_BYTES, Header, Journal, read_journal, write_batch, write_header
from coordinator.sessions.output import Output
from worker.errors import InputError
from worker.platform.files import open_locked, sync_file, writing
from worker.platform.tasks import shielded
from worker.platform.threads import CallThread

_SYNC_EVERY_S = 0.1  # at most: a disk that is asked after every step makes the steps wait


def holds_something(path: Path | None) -> bool:
    """Return whether the file exists and is not empty."""
    try:
        return path is not None and path.stat().st_size > 0
    except OSError:
        return False


class JournalFile:
    """The journal file of one answer, locked while it is open. Use as an async context manager.

    Once `keep` returns, its record survives the end of this process; after the next sync (0.1 s) also a power failure.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and read it. An incomplete last record is dropped.

        Raises:
            InputError: another process has it, it is no journal, or it was changed.
        """
        self._path = path
        self._num_bytes = 0
        self._unsynced = asyncio.Event()
        self._syncing: asyncio.Task[None] | None = None
        self._is_new = not path.exists()
        self._file = open_locked("journal", path, 0o600)
        with contextlib.ExitStack() as stack, writing("journal", self._path):
            stack.callback(os.close, self._file)
            self.found = self._read()
            stack.pop_all()
        self._num_tokens = len(self.found.known.tokens) if self.found else 0
        self._writer, self._syncer = CallThread("journal"), CallThread("journal-sync")

    async def __aenter__(self) -> Self:
        self._syncing = asyncio.create_task(self._sync())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._syncing is not None
        self._syncing.cancel()
        await asyncio.wait([self._syncing])
        try:
            if not self._syncing.cancelled():
                self._syncing.result()  # the disk has failed, and may tell so only once
            with writing("journal", self._path):
                await self._writer.run(partial(sync_file, self._file))
        finally:
            self._writer.close()
            self._syncer.close()
            if self._is_new and not self._num_bytes:  # nothing came of the request
                self._path.resolve().unlink(missing_ok=True)  # not the link to it
            os.close(self._file)

    async def begin(self, header: Header) -> None:
        """Write the header into an empty file."""
        assert self.found is None and not self._num_bytes
        await self._append(write_header(header))
        with writing("journal", self._path):
            await self._writer.run(self._sync_with_folder)

    async def keep(self, output: Output, emit: Callable[[str], None]) -> None:
        """Write the output's record, then give its text to `emit`, on the same thread and at once.

        After a kill the journal holds everything that was shown, and at most one step that was not.
        """
        if self._syncing is not None and self._syncing.done():
            self._syncing.result()  # the disk has failed
        if output.tokens or output.finish_reason is not None:
            await self._append(
                write_batch(self._num_tokens, output), partial(emit, output.text) if output.text else None
            )
            self._num_tokens += len(output.tokens)
            self._unsynced.set()

    async def _append(self, record: bytes, then: Callable[[], None] | None = None) -> None:
        if self._num_bytes + len(record) > MOST_BYTES:
            raise InputError("journal", f"{self._path} would be longer than the {MOST_BYTES} bytes that it may have")
        writing = self._writer.submit(partial(self._write, record, then))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])  # the file and the text that was shown must agree
            raise
        self._num_bytes += len(record)

    def _write(self, record: bytes, then: Callable[[], None] | None) -> None:
        with writing("journal", self._path):
            view = memoryview(record)
            while view:
                view = view[os.write(self._file, view) :]
        if then is not None:
            then()

    async def _sync(self) -> None:
        """Sync the file to disk after writes, at most every 0.1 s."""
        while True:
            await self._unsynced.wait()
            self._unsynced.clear()
            with writing("journal", self._path):
                await shielded(self._syncer.run(partial(sync_file, self._file)))  # a failure may be told only once
            await asyncio.sleep(_SYNC_EVERY_S)

    def _read(self) -> Journal | None:
        size = os.fstat(self._file).st_size
        if size > MOST_BYTES:
            raise InputError("journal", f"expected at most {MOST_BYTES} bytes, found {size} in {self._path}")
        data = b"".join(iter(lambda: os.read(self._file, 1 << 20), b""))
        journal = read_journal(data)
        self._num_bytes = journal.num_bytes if journal else 0
        if self._num_bytes < size:
            os.ftruncate(self._file, self._num_bytes)
            sync_file(self._file)
        return journal

    def _sync_with_folder(self) -> None:
        sync_file(self._file)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            sync_file(folder)  # it holds the name
        finally:
            os.close(folder)
