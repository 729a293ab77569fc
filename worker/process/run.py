"""Runs a command: exceptions become messages and exit codes. The other of the two places that may catch anything."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.exceptions import TyperException

from worker.errors import BrigadeError, InputError, internal_error_text
from worker.process.app import App
from worker.process.call_thread import calls_are_left
from worker.process.interrupts import INTERRUPTED

_FLAGS = {"temperature": "temp"}  # that are spelled otherwise than the parameter
_WAYS_OUT = {"give it raw": "--raw", "use an int8 cache": "--kv int8"}  # what messages advise, and the flags for it


def run_command(command: Callable[..., Any] | typer.Typer) -> NoReturn:
    """Parse the process's arguments, run the command, leave with its exit code."""
    _open_standard_streams()
    code = _exit_code(command if isinstance(command, typer.Typer) else _app_of(command))
    if calls_are_left():
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError):  # its reader left
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _app_of(command: Callable[..., Any]) -> typer.Typer:
    app = App()
    app.command()(command)
    return app


def _exit_code(app: typer.Typer) -> int:
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()  # here, where a closed standard output can still be told from a failure
        return code
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # that is how typer reports it
            return _reader_left()
        raise
    except TyperException as error:
        context = getattr(error, "ctx", None)
        if message := error.format_message():  # none if no command was given: its help is out already
            _complain(f"{message} (see {context.command_path if context else 'brigade'} --help)")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrigadeError as error:
        _complain(_spelled(error))
        return error.exit_code
    except BrokenPipeError:
        return _reader_left()
    except OSError as error:
        _complain(f"{error.filename or 'cannot write standard output'}: {error.strerror}")
        sys.stdout = None  # what is still buffered cannot be written either
        return 2
    except Exception as error:
        _complain(internal_error_text(error))
        return 3


def _open_standard_streams() -> None:
    """Put nothing where the caller closed a standard stream: else the next file or socket would become it."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number is this one
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is: what cannot be encoded is spelled


def _spelled(error: BrigadeError) -> str:
    """The error with the parameter that it is about as a flag, and with the flag for what it advises."""
    if not isinstance(error, InputError) or not error.field:
        return str(error)
    message = error.message
    for advice, flag in _WAYS_OUT.items():
        message = message.replace(advice, f"{advice} ({flag})")
    return f"--{_FLAGS.get(error.field, error.field).replace('_', '-')}: {message}"


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def _reader_left() -> int:
    """Standard output was closed (`| head`): not a failure, but nothing more may be written."""
    sys.stdout = None
    return 0
