"""Running our scripts on another machine by the system's ssh, with the user's keys and configuration.

A script reaches /bin/sh on its standard input, after its values as quoted assignments: the account's login shell has
nothing to expand. What comes back is another machine's word, so its size is limited and its text made printable.
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
from worker.platform.text import printable

MARK = "@brigade "  # before the lines that scripts say to us; others come from greetings and programs there
_SCRIPTS = Path(__file__).parent / "remote"
_OPTIONS = (
    "BatchMode=yes",  # no password can be typed
    "ConnectTimeout=10",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
    "ControlMaster=no",  # a master that stays behind would keep our pipes open
)
_FAILED = 255  # ssh's own exit code
_OUTPUT_S = 30.0
_CLOSED_S = 1.0  # until the pipes of what was killed are closed, unless others have them
_MAX_LINE = 1 << 20
_MAX_SAID = 1 << 18  # characters of all lines that a script says to us
_KEPT_BYTES = 1 << 14  # of the end of standard error
_MAX_LINES = 4  # of standard error that are shown
_FIXES = {  # by what ssh says
    "Host key verification failed": "connect once by hand, to accept its key: ssh {place}",
    "Permission denied": "put your key there: ssh-copy-id {place}",
    "Connection refused": "on that Mac: System Settings, General, Sharing, Remote Login",
    "Could not resolve hostname": "expected USER@HOST or a host of your ssh configuration in `ssh:`",
    "timed out": "is it awake, and on this network?",
}

_MISSING = "expected the program ssh here, found none"

Read = Callable[[str], None]  # takes a line
Tell = Callable[[str, str], None]  # takes the first word of a line that a script says to us, and the rest


def require_ssh() -> None:
    """Raise ConfigError if this machine has no ssh."""
    if shutil.which("ssh") is None:
        raise ConfigError(_MISSING)


class Remote:
    """The account of one node; `place` is what ssh is given."""

    def __init__(self, node: str, place: str) -> None:
        self.node = node
        self.place = place

    async def run(
        self, script: str, values: Mapping[str, str], within_s: float, tell: Tell = lambda word, rest: None
    ) -> dict[str, list[str]]:
        """Run one of our scripts and return the lines that it says to us, grouped by their first word.

        Raises:
            BrigadeError: ssh or the script failed, with what they said; or the script says far too much.
            ConfigError: this machine has no ssh.
        """
        found: dict[str, list[str]] = {}
        num_said = 0

        def read(line: str) -> None:
            nonlocal num_said
            if line.startswith(MARK):
                num_said += len(line)
                if num_said > _MAX_SAID:
                    raise BrigadeError(f"told more than {_MAX_SAID >> 10} KiB about itself")
                word, _, rest = line.removeprefix(MARK).partition(" ")
                found.setdefault(word, []).append(rest)
                tell(word, rest)

        await self._feed("/bin/sh -s", assigned(values) + text_of(script), within_s, read)
        return found

    async def output(self, script: str, values: Mapping[str, str], read: Read, *, is_followed: bool = False) -> None:
        """Read a script's lines as they come. A script that is followed keeps its standard input until we leave.

        Raises as `run`.
        """
        within_s = None if is_followed else _OUTPUT_S
        await self._feed("/bin/sh -s", assigned(values) + text_of(script), within_s, read, is_followed=is_followed)

    async def send(self, folder: str, files: Mapping[str, bytes], within_s: float) -> None:
        """Replace a folder below the account's home by these files, readable by that account only. Raises as `run`.

        Args:
            folder: a path without anything that a shell would expand.
        """
        unpack = f"cd && umask 077 && rm -rf {folder} && mkdir -p {folder} && tar -x -o -m -f - -C {folder}"
        await self._feed(f"/bin/sh -c '{unpack}'", pack_files(files), within_s, lambda line: None)

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
                start_new_session=True,  # Ctrl-C is not for it
                limit=_MAX_LINE,
            )  # fmt: skip
        except FileNotFoundError:
            raise ConfigError(_MISSING) from None
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS, if all have ended
                    os.killpg(process.pid, signal.SIGKILL)  # with its children, such as ProxyJump's ssh
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSED_S):
                        await process.communicate()  # empties the pipes, or they would not close

    def failure(self, code: int, said: str) -> BrigadeError:
        """Return the error for ssh's exit code and its standard error."""
        lines = [printable(" ".join(line.split())) for line in said.splitlines() if line.strip()]
        why = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)][-1:]
        lines = [line for line in lines if not line.startswith(MARK)][-_MAX_LINES:]
        if code != _FAILED:
            told = ": ".join(filter(None, [*why, "; ".join(lines)]))
            return BrigadeError(told or f"a command there ended with exit code {code}", node=self.node)
        fix = next((fix for words, fix in _FIXES.items() if words in said), "try it by hand: ssh {place}")
        text = "; ".join(lines) or "nothing"
        return BrigadeError(f"ssh {self.place} said: {text} ({fix.format(place=self.place)})", node=self.node)


def text_of(script: str) -> bytes:
    """Return one of our scripts behind the part that all share."""
    return b"".join((_SCRIPTS / f"{name}.sh").read_bytes() for name in ("shared", script))


def assigned(values: Mapping[str, str]) -> bytes:
    """Return the values as assignments, quoted for a POSIX shell."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()).encode()


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Return the files as a tar, with mode 600."""
    packing = io.BytesIO()
    with tarfile.open(fileobj=packing, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    return packing.getvalue()


async def _talk(process: asyncio.subprocess.Process, fed: bytes, read: Read, *, is_followed: bool) -> str:
    """Feed the process and read its lines; return the end of its standard error.

    Args:
        is_followed: leave its standard input open until we leave.
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
    """Read a stream to its end and return its last bytes, from the beginning of a line if they hold one."""
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
        raise BrigadeError(f"printed a line of more than {_MAX_LINE >> 20} MiB") from None


async def _give(stdin: asyncio.StreamWriter, fed: bytes, *, closes: bool) -> None:
    with contextlib.suppress(ConnectionError):  # its exit code says why it ended
        stdin.write(fed)
        await stdin.drain()
        if closes:
            stdin.close()
