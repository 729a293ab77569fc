"""Scripts and files on another machine, by the system's ssh with the user's keys and configuration.

A script reaches /bin/sh on its standard input, after its values as quoted assignments: the account's login shell has
nothing to expand. The output comes from another machine, so its size is limited and its text made printable.
"""

import asyncio
import contextlib
import io
import os
import secrets
import shlex
import shutil
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from coordinator.deploy.install import worker_folder
from worker.errors import BrigadeError, ConfigError
from worker.node.certificates import file_name
from worker.platform.tasks import cancel_all
from worker.platform.text import printable

ANSWER_MARK = "@brigade "  # begins the lines that scripts address to us; greetings and other programs print lines, too
_SCRIPTS = Path(__file__).parent / "remote"
_OPTIONS = (
    "BatchMode=yes",  # no password can be typed
    "ConnectTimeout=10",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
    "RemoteCommand=none",  # ssh refuses a second command
    "ClearAllForwardings=yes",  # another session of the user's may have taken their ports
    "ControlMaster=no",  # a master that stays behind would keep our pipes open
)
_FAILED = 255  # ssh's own exit code
_LOG_S = 30.0
_CLOSED_S = 1.0  # to wait until the pipes of a killed process close: others may hold them
_MAX_LINE = 1 << 20
_MAX_MARKED = 1 << 18  # characters of all marked lines of a script
_KEPT_BYTES = 1 << 14  # of the end of standard error
_MAX_LINES = 4  # of standard error that are shown
_FIXES = {  # by ssh's message; the first that it has
    "has changed and you have requested strict checking": "its key is another one than before; if that is right: "
    "ssh-keygen -R 'HOST', with the host as named here, then connect once by hand: ssh {place}",
    "Host key verification failed": "connect once by hand, to accept its key: ssh {place}",
    "Permission denied": "put your key there: ssh-copy-id {place}; if it is there, unlock it: ssh-add",
    "Connection refused": "on that Mac: System Settings, General, Sharing, Remote Login",
    "Could not resolve hostname": "expected USER@HOST or a host of your ssh configuration in `ssh:`",
    "timed out": "is it awake, and on this network?",
}
_MISSING = "expected the program ssh here, found none"

Read = Callable[[str], None]  # takes a line


def require_ssh() -> None:
    """Raise ConfigError if this machine has no ssh."""
    if shutil.which("ssh") is None:
        raise ConfigError(_MISSING)


class Remote:
    """The account that runs one worker. All methods raise BrigadeError, with the message of ssh or of the script."""

    def __init__(self, node: str, place: str, report: Callable[[str], None] = lambda phase: None) -> None:
        """`place` is ssh's destination; `report` takes each phase that a script announces."""
        self.node = node
        self.place = place
        self.report = report
        self._parcel = f"sent-{secrets.token_hex(8)}"  # the folder of sent files, in the worker's

    async def run(self, script: str, within_s: float, **values: str) -> dict[str, list[str]]:
        """Run one of our scripts and return the lines it addresses to us, grouped by their first word."""
        found: dict[str, list[str]] = {}
        num_characters = 0

        def read(line: str) -> None:
            nonlocal num_characters
            if line.startswith(ANSWER_MARK):
                num_characters += len(line)
                if num_characters > _MAX_MARKED:
                    raise BrigadeError(f"reported more than {_MAX_MARKED >> 10} KiB about itself")
                word, _, rest = line.removeprefix(ANSWER_MARK).partition(" ")
                found.setdefault(word, []).append(rest)
                if word == "phase":
                    self.report(printable(rest))

        fed = b"echo\n" + self._fed(script, values)  # ends a line that the login shell's greeting may have begun
        await self._feed("/bin/sh -s", fed, within_s, read)
        return found

    async def log(self, num_lines: int, read: Read, *, follows: bool = False, since_start: bool = False) -> None:
        """Read the last lines of the worker's log, or of its last start; `follows` goes on until it is cancelled."""
        choice = {"follow": "yes" if follows else "no", "since_start": "yes" if since_start else "no"}
        fed = self._fed("log", {"lines": str(num_lines), **choice})
        await self._feed("/bin/sh -s", fed, None if follows else _LOG_S, read)

    async def send(self, files: Mapping[str, bytes], within_s: float) -> None:
        """Put these files where the next script takes them from, readable by that account only."""
        folder = f"{worker_folder(self.node)}/{self._parcel}"  # no character that a shell would expand
        unpack = f"cd && umask 077 && rm -rf {folder} && mkdir -p {folder} && tar -x -o -m -f - -C {folder}"
        await self._feed(f"/bin/sh -c '{unpack}'", pack_files(files), within_s, lambda line: None)

    def _fed(self, script: str, values: Mapping[str, str]) -> bytes:
        own = {"name": self.node, "key_file": file_name(self.node), "parcel": self._parcel}
        return assigned({**own, **values}) + text_of(script)

    async def _feed(self, command: str, fed: bytes, within_s: float | None, read: Read) -> None:
        """Run a command there, feed it and read its lines. Without a time limit, its input stays open until we end."""
        async with self._process(command) as process:
            try:
                async with asyncio.timeout(within_s):
                    errors = await _talk(process, fed, read, closes=within_s is not None)
            except TimeoutError:
                raise BrigadeError(f"{self.place} was not done within {within_s:.0f} s", node=self.node) from None
            except BrigadeError as error:
                raise error.at(self.node) from None
        if process.returncode:
            raise self.failure(process.returncode, errors)

    @contextlib.asynccontextmanager
    async def _process(self, command: str) -> AsyncIterator[asyncio.subprocess.Process]:
        pipe = asyncio.subprocess.PIPE
        options = [word for option in _OPTIONS for word in ("-o", option)]
        try:
            process = await asyncio.create_subprocess_exec(
                *("ssh", "-T", *options, "--", self.place, command),
                stdin=pipe, stdout=pipe, stderr=pipe,
                start_new_session=True,  # Ctrl-C must not reach it
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

    def failure(self, code: int, errors: str) -> BrigadeError:
        """Return the error for ssh's exit code and its standard error."""
        lines = [printable(" ".join(line.split())) for line in errors.splitlines() if line.strip()]
        why = [line.removeprefix(ANSWER_MARK) for line in lines if line.startswith(ANSWER_MARK)][-1:]
        lines = [line for line in lines if not line.startswith(ANSWER_MARK)][-_MAX_LINES:]
        if code != _FAILED:
            text = ": ".join(filter(None, [*why, "; ".join(lines)]))
            return BrigadeError(text or f"a command there ended with exit code {code}", node=self.node)
        fix = next((fix for words, fix in _FIXES.items() if words in errors), "try it by hand: ssh {place}")
        text = "; ".join(lines) or "nothing"
        return BrigadeError(f"ssh {self.place} said: {text} ({fix.format(place=self.place)})", node=self.node)


def text_of(script: str) -> bytes:
    """Return one of our scripts, after the part that all share."""
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


async def _talk(process: asyncio.subprocess.Process, fed: bytes, read: Read, *, closes: bool) -> str:
    """Feed the process and read its lines; return the end of its standard error."""
    assert process.stdin and process.stdout and process.stderr
    reading = asyncio.create_task(_end_of(process.stderr))
    writing = asyncio.create_task(_write(process.stdin, fed, closes=closes))
    try:
        while line := await _next_line(process.stdout):
            read(line.decode(errors="replace").rstrip("\r\n"))
        await process.wait()
        return (await reading).decode(sys.getfilesystemencoding(), errors="replace")
    finally:
        await cancel_all(reading, writing)


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


async def _write(stdin: asyncio.StreamWriter, fed: bytes, *, closes: bool) -> None:
    with contextlib.suppress(ConnectionError):  # the exit code tells why it ended
        stdin.write(fed)
        await stdin.drain()
        if closes:
            stdin.close()
