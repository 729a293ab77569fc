"""How commands read their flags and how they end: an exit code, and one line on standard error that says why."""

import errno
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from coordinator.cli.app import app as brigade
from worker.errors import BrigadeError, ConfigError, InputError
from worker.platform import run as run_module
from worker.platform.run import App, run_command

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with arguments; its exit code, standard output and standard error."""

    def run(command: Callable[..., Any] | typer.Typer, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["brigade", *arguments])
        monkeypatch.setattr(run_module, "calls_are_left", lambda: False)  # those of other tests
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # a command may take it away
        with pytest.raises(SystemExit) as ended:
            run_command(command)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out, err

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_a_folder_that_is_gone_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, out, err = run(lambda: print("done"))
    monkeypatch.chdir(tmp_path)
    assert (code, out) == (2, "") and "the current folder does not exist any more" in err


def test_a_command_that_is_done_says_only_what_it_says_and_may_choose_its_exit_code(run: Run) -> None:
    assert run(lambda: print("42")) == (0, "42\n", "")
    assert run(lambda: 7) == (7, "", "")


TOLD = "expected this, got that"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BrigadeError(TOLD), 3, TOLD),
        (ConfigError(TOLD), 2, TOLD),
        (InputError("", TOLD), 2, TOLD),
        (InputError("top_k", TOLD), 2, f"--top-k: {TOLD}"),
        (InputError("temperature", TOLD), 2, f"--temp: {TOLD}"),
        (InputError("dry_sequence_breakers.0", TOLD), 2, f"--dry-sequence-breaker: {TOLD}"),
        (BrigadeError("is gone", node="air"), 3, "worker air: is gone"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "cannot write standard output: No space left on device"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Abort(), 130, ""),
        (typer.Exit(5), 5, ""),
        (SystemExit(9), 9, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 0, ""),  # the reader has left
    ],
    ids=repr,
)
def test_each_error_gives_an_exit_code_and_a_line(run: Run, error: BaseException, code: int, said: str) -> None:
    assert run(raising(error)) == (code, "", f"error: {said}\n" if said else "")


def test_what_the_user_can_mend_is_exit_code_2_and_what_went_wrong_on_the_way_is_3() -> None:
    codes = {kind.__name__: kind.exit_code for kind in BrigadeError.__subclasses__()}
    assert codes == {
        "InputError": 2, "ConfigError": 2, "ModelError": 2, "SamplingError": 2,
        "FrameError": 3, "CacheMismatch": 3, "NodeBusy": 3, "OutOfMemory": 3, "QueueFull": 3, "StageLost": 3,
        "ReaderLost": 3, "ServerFailed": 3, "InternalError": 3,
    }  # fmt: skip


NO_FILE = OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")


@pytest.mark.parametrize("error", [KeyError("slot"), ValueError("two\nlines"), NO_FILE])
def test_a_bug_is_one_line_that_says_so_and_where_it_was_raised(run: Run, error: Exception) -> None:
    command = raising(error)
    code, out, err = run(lambda: command())
    where = f"test_run.py:{command.__code__.co_firstlineno + 1}"
    assert (code, out, err) == (3, "", f"error: internal error: {error!r} at {where}; this is a bug\n")


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        ("-n 1 text --num-rows=2", "num_rows"),
        ("--loud --quiet", "loud"),
        ("-n 1 --loud --num-rows=1 --loud", "1 None None"),
        ("--stop a -n 3 text --stop b", "3 ['a', 'b'] text"),
    ],
)
def test_a_flag_may_repeat_its_value_but_has_no_two(arguments: str, outcome: str) -> None:
    app = App()

    @app.command()
    def command(
        num_rows: Annotated[int, typer.Option("--num-rows", "-n")] = 0,
        stop: Annotated[list[str] | None, typer.Option()] = None,
        text: Annotated[str | None, typer.Argument()] = None,
        is_loud: Annotated[bool, typer.Option("--loud/--quiet")] = False,
    ) -> str:
        return f"{num_rows} {stop} {text}"

    try:
        found = app(arguments.split(), standalone_mode=False)
    except InputError as error:
        found = error.field
    assert found == outcome


def test_so_it_is_for_a_single_command(run: Run) -> None:
    def command(num_rows: int = 0) -> None: ...

    said = "error: --num-rows: expected one value, found several\n"
    assert run(command, "--num-rows", "1", "--num-rows", "2") == (2, "", said)


def test_a_reader_that_left_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class ClosedPipe(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "argv", ["brigade"])
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: print("42"))
    assert ended.value.code == 0 and capsys.readouterr().err == ""
    assert sys.stdout is None, "or Python flushes it once more on its way out, and complains"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "--count many",
            "Invalid value for '--count': expected a valid integer, unable to parse string as an integer, got many",
        ),
        ("--count 0", "Invalid value for '--count': expected greater than or equal to 1, got 0 (see"),
        ("--count", "--count"),
    ],
)
def test_a_wrong_flag_is_one_line_that_points_to_the_help(run: Run, arguments: str, words: str) -> None:
    def command(count: Annotated[int, typer.Option(min=1)]) -> None:
        print(count)

    code, out, err = run(command, *arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and words in err and err.endswith("--help)\n") and err.count("\n") == 1


def test_the_help_of_the_command_is_pointed_to_where_a_value_is_missing(run: Run) -> None:
    for arguments in ("plan --config", "plan --nonsense"):
        code, _, err = run(brigade, *arguments.split())
        assert code == 2 and err.endswith(" plan --help)\n")


def test_help_is_shown_where_it_is_asked_for_and_where_there_is_no_command(run: Run) -> None:
    code, out, err = run(brigade, "--help")
    assert (code, err) == (0, "")
    assert all(name in out for name in ("worker", "generate", "plan", "verify"))
    code, out, err = run(brigade)
    assert code == 2
    assert "generate" in out + err and "error:" not in err


def test_of_errors_in_a_group_the_first_is_told(run: Run) -> None:
    code, _, err = run(raising(ExceptionGroup("several", [KeyError("slot"), ValueError("other")])))
    assert code == 3 and "KeyError('slot')" in err and "several" not in err


def test_text_that_standard_output_cannot_hold_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["brigade"])
    monkeypatch.setattr(run_module, "calls_are_left", lambda: False)  # those of other tests

    with pytest.raises(SystemExit) as ended:
        run_command(lambda: print("日\ud800"))
    assert not ended.value.code and out.buffer.getvalue() == rb"\u65e5\ud800" + b"\n"  # type: ignore[attr-defined]
