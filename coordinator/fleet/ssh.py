"""One account on another machine, by the system's own ssh, with the user's keys and configuration.

What runs there is a script for /bin/sh on its standard input, so the account's login shell has nothing to expand.
Values come before it as assignments, quoted for that shell.
"""

import asyncio
import contextlib
import io
import os
import shlex
import shutil
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from worker.errors import BrigadeError, ConfigError
from worker.process.printable import printable

MARK = "@brigade "  # begins the lines that are meant for us; others are greetings, or of programs there
_SCRIPTS = Path(__file__).parent / "remote"
_OPTIONS = (
    "BatchMode=yes",  # nobody is there to type a password
    "ConnectTimeout=10",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
    "ControlMaster=no",  # one that stays behind would keep our pipes open
    "ClearAllForwardings=yes",  # the user's own are for sessions: nothing is to listen for this one
    "ForwardAgent=no",
    "ForwardX11=no",
    "RemoteCommand=none",
    "RequestTTY=no",
)
_FAILED = 255  # ssh's own exit code
_OUTPUT_S = 30.0
_CLOSED_S = 1.0  # until the pipes of what was killed are closed, unless others have them
_LONGEST_LINE = 1 << 20
_MOST_TOLD = 1 << 18  # characters of all lines that are meant for us
_KEPT_BYTES = 1 << 14  # of the end of what is said on standard error
_MOST_SAID = 4  # lines that are shown of what failed there
_WAYS_OUT = {  # what ssh says, and what to do about it
    "Host key verification failed": "connect once by hand, to accept its key: ssh {place}",
    "Permission denied": "put your key there: ssh-copy-id {place}",
    "Connection refused": "on that Mac: System Settings, General, Sharing, Remote Login",
    "Could not resolve hostname": "expected USER@HOST or a host of your ssh configuration in `ssh:`",
    "timed out": "is it awake, and on this network?",
}

_MISSING = "expected the program ssh here, found none"

Read = Callable[[str], None]  # takes a line
Tell = Callable[[str, str], None]  # takes a line that is meant for us: its first word and the rest


def require_ssh() -> None:
    """Raise ConfigError where there is no ssh: that is no node's failure."""
    if shutil.which("ssh") is None:
        raise ConfigError(_MISSING)


class Remote:
    """The account of one node."""

    def __init__(self, node: str, place: str) -> None:
        self.node = node
        self.place = place

    async def run(
        self, script: str, values: Mapping[str, str], within_s: float, tell: Tell = lambda word, rest: None
    ) -> dict[str, list[str]]:
        """Run one of our scripts there; returns what it has told, by the first word of each line.

        Raises:
            BrigadeError: ssh did not get there, or the script failed; with what they said. Or it told far too much.
            ConfigError: there is no ssh here.
        """
        found: dict[str, list[str]] = {}
        num_told = 0

        def read(line: str) -> None:
            nonlocal num_told
            if line.startswith(MARK):
                num_told += len(line)
                if num_told > _MOST_TOLD:
                    raise BrigadeError(f"told more than {_MOST_TOLD >> 10} KiB about itself")
                word, _, rest = line.removeprefix(MARK).partition(" ")
                found.setdefault(word, []).append(rest)
                tell(word, rest)

        await self._feed("/bin/sh -s", assigned(values) + text_of(script), within_s, read)
        return found

    async def output(self, script: str, values: Mapping[str, str], read: Read, *, is_followed: bool = False) -> None:
        """Read the lines that a script prints, as they come; a script that is followed notices if we leave.

        Raises likewise.
        """
        within_s = None if is_followed else _OUTPUT_S
        await self._feed("/bin/sh -s", assigned(values) + text_of(script), within_s, read, is_followed=is_followed)

    async def send(self, folder: str, files: Mapping[str, bytes], within_s: float) -> None:
        """Put these files, which only that account may read, into a folder below its home, and no others.

        Raises likewise. `folder` has nothing in it that any shell would expand.
        """
        unpack = f"cd && umask 077 && rm -rf {folder} && mkdir -p {folder} && tar -x -o -m -f - -C {folder}"
        await self._feed(f"/bin/sh -c '{unpack}'", packed(files), within_s, lambda line: None)

    async def _feed(
        self, command: str, fed: bytes, within_s: float | None, read: Read, *, is_followed: bool = False
    ) -> None:
        async with self._process(command) as process:
            try:
                async with asyncio.timeout(within_s):
                    said = await _talk(process, fed, read, is_followed=is_followed)
            except TimeoutError:
                raise BrigadeError(f"{self.place} was not done within {within_s:.0f} s", node=self.node) from None
            except BrigadeError as error:
                raise error.at(self.node) from None
        if process.returncode:
            raise self.failure(process.returncode, said)

    @contextlib.asynccontextmanager
    async def _process(self, command: str) -> AsyncIterator[asyncio.subprocess.Process]:
        pipe = asyncio.subprocess.PIPE
        options = [word for option in _OPTIONS for word in ("-o", option)]
        try:
            process = await asyncio.create_subprocess_exec(
                *("ssh", "-T", *options, "--", self.place, command),
                stdin=pipe, stdout=pipe, stderr=pipe,
                start_new_session=True,  # Ctrl-C is for us
                limit=_LONGEST_LINE,
            )  # fmt: skip
        except FileNotFoundError:
            raise ConfigError(_MISSING) from None
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says so where all have ended
                    os.killpg(process.pid, signal.SIGKILL)  # what it goes through, too: ProxyJump's ssh say
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSED_S):
                        await process.communicate()  # what is in the pipes yet, or they would not close

    def failure(self, code: int, said: str) -> BrigadeError:
        """What to say of a process that ended so."""
        lines = [printable(" ".join(line.split())) for line in said.splitlines() if line.strip()]
        why = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)][-1:]
        lines = [line for line in lines if not line.startswith(MARK)][-_MOST_SAID:]
        if code != _FAILED:
            told = ": ".join(filter(None, [*why, "; ".join(lines)]))
            return BrigadeError(told or f"a command there ended with exit code {code}", node=self.node)
        way_out = next((way for words, way in _WAYS_OUT.items() if words in said), "try it by hand: ssh {place}")
        text = "; ".join(lines) or "nothing"
        return BrigadeError(f"ssh {self.place} said: {text} ({way_out.format(place=self.place)})", node=self.node)


def text_of(script: str) -> bytes:
    """A script of ours, after what it shares with the others."""
    return b"".join((_SCRIPTS / f"{name}.sh").read_bytes() for name in ("shared", script))


def assigned(values: Mapping[str, str]) -> bytes:
    """The values as a POSIX shell takes them, whatever they hold."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()).encode()


def packed(files: Mapping[str, bytes]) -> bytes:
    """The files as a tar, of mode 600."""
    packing = io.BytesIO()
    with tarfile.open(fileobj=packing, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    return packing.getvalue()


async def _talk(process: asyncio.subprocess.Process, fed: bytes, read: Read, *, is_followed: bool) -> str:
    """Give the process its input while its lines are read; returns the end of what it said on standard error.

    If it is followed its standard input stays open, until we leave.
    """
    assert process.stdin and process.stdout and process.stderr
    saying = asyncio.create_task(_end_of(process.stderr))
    giving = asyncio.create_task(_give(process.stdin, fed, closes=not is_followed))
    try:
        while line := await _next_line(process.stdout):
            read(line.decode(errors="replace").rstrip("\r\n"))
        await process.wait()
        return (await saying).decode(sys.getfilesystemencoding(), errors="replace")
    finally:
        for task in (saying, giving):
            task.cancel()
        await asyncio.gather(saying, giving, return_exceptions=True)


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    """The last bytes of it, from the beginning of a line if there is one among them: no more than that is kept."""
    kept = b""
    while more := await stream.read(_KEPT_BYTES):
        kept += more
        if len(kept) > _KEPT_BYTES:
            kept = kept[-_KEPT_BYTES:]
            kept = kept[kept.find(b"\n") + 1 :]
    return kept


async def _next_line(stdout: asyncio.StreamReader) -> bytes:
    try:
        return await stdout.readline()
    except ValueError:
        raise BrigadeError(f"printed a line of more than {_LONGEST_LINE >> 20} MiB") from None


async def _give(stdin: asyncio.StreamWriter, fed: bytes, *, closes: bool) -> None:
    with contextlib.suppress(ConnectionError):  # it ended: its exit code says why
        stdin.write(fed)
        await stdin.drain()
        if closes:
            stdin.close()
