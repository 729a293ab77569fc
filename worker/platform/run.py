"""Typer apps, and how a command ends: exceptions become messages and exit codes.

This is one of the few places with a broad `except`.
"""

import contextlib
import errno
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from copy import copy
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption
from typer.exceptions import TyperException

from worker.errors import BrigadeError, InputError, internal_error_text
from worker.platform.interrupts import INTERRUPTED, find_compiler
from worker.platform.text import printable
from worker.platform.threads import calls_are_left

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN)  # of a stream
# parameters whose flags have another name
_FLAGS = {"temperature": "temp", "messages": "prompt", "dry_sequence_breakers": "dry_sequence_breaker"}


class OneValueEach(TyperCommand):
    """A command that refuses an option given with different values: only the last one would count."""

    def get_help(self, ctx: Any) -> str:
        """Return the help, each paragraph in one line: typer would keep a docstring's line ends beside its own."""
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(self.help or ""))
        return super().get_help(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises InputError for an option with different values, and what the parser raises."""
        parser = self.make_parser(ctx)
        options = [each for each in self.params if isinstance(each, TyperOption) and not each.multiple]
        for option in options:
            collecting = copy(option)
            collecting.multiple = True
            collecting.add_to_parser(parser, ctx)  # in the place of the option, which keeps its last value only
        try:
            values, _, _ = parser.parse_args(args=list(args))
        except TyperException as error:
            vars(error)["ctx"] = ctx  # which lacks where a value is missing
            raise
        for option in options:
            if len(set(values.get(option.name or "", ()))) > 1:
                raise InputError(field_of(option), "expected one value, found several")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, after the step that must precede its first thread."""
        find_compiler()
        return super().invoke(ctx)


class App(typer.Typer):
    """A Typer app whose options take one value each, with -h for help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = OneValueEach, **settings: Any
    ) -> Any:
        return super().command(name, cls=cls, **settings)


def field_of(parameter: Any) -> str:
    """Return the name that a request gives to the parameter of this flag."""
    longest = max(parameter.opts, key=len)
    return str(longest.lstrip("-").replace("-", "_"))


def run_command(command: Callable[..., Any] | typer.Typer) -> NoReturn:
    """Parse the process's arguments, run the command, leave with its exit code."""
    _open_standard_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        _complain("the current folder does not exist any more; change to another one")
        sys.exit(2)
    if isinstance(command, typer.Typer):
        app = command
    else:
        app = App()
        app.command()(command)
    code = _exit_code(app)
    if calls_are_left():
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError):  # its reader left
                stream.write("\x1b[?25h\n" if stream.isatty() else "")  # a bar of the abandoned thread hides the cursor
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _exit_code(app: typer.Typer) -> int:
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()  # here a closed standard output can still be told from a failure
        return code
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer reports it so
            return _reader_left()
        raise
    except TyperException as error:
        context = getattr(error, "ctx", None)
        if message := error.format_message():  # empty if no command was given: its help is printed already
            message = message.replace(": Value error, ", ": ").replace("Input should be", "expected")  # pydantic's
            cause: Any = error.__cause__
            given = cause.errors()[0]["input"] if hasattr(cause, "errors") else ""
            if given != "" and repr(given) not in message:
                message += f", got {printable(str(given), 60)}"
            _complain(f"{message} (see {context.command_path if context else 'brigade'} --help)")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrigadeError as error:
        if isinstance(error, InputError) and error.field:
            name = error.field.partition(".")[0]  # a server names the place within a list, too
            _complain(f"--{_FLAGS.get(name, name).replace('_', '-')}: {error.message}")
        else:
            _complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        return _reader_left()
    except Exception as error:
        if isinstance(error, OSError) and (error.filename or error.errno in _UNWRITABLE):
            _complain(f"{error.filename or 'cannot write standard output'}: {error.strerror}")
            sys.stdout = None  # what is still buffered cannot be written either
            return 2
        _complain(internal_error_text(error))
        return 3


def _open_standard_streams() -> None:
    """Open the null device for each closed standard stream, or the next opened file would take its place.

    Nothing can be written to a closed standard output: what has an answer to write fails.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number is this one
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
        for number, stream, mode in ((0, sys.stdin, "r"), (1, sys.stdout, "w"), (2, sys.stderr, "w"))
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error does
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        encoding = sys.stderr.encoding
        sys.stderr = _Unfailing(sys.stderr.detach(), encoding, "backslashreplace", line_buffering=True)
        sys.__stderr__ = sys.stderr  # type: ignore[misc] # Python turns to it at its end


class _Unfailing(io.TextIOWrapper):
    """Standard error: what cannot be written there, on a full disk or without a reader, is lost and fails nothing."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def _reader_left() -> int:
    """Return the exit code when standard output was closed (`| head`), and write nothing more."""
    sys.stdout = None
    return 0
