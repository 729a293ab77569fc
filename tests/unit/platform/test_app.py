"""What every command gets from the app that it is made of."""

import sys
from typing import Annotated

import pytest
import typer

from worker.errors import InputError
from worker.platform.run import App, field_of, run_command


def make_app() -> App:
    app = App()

    @app.command()
    def command(
        num_rows: Annotated[int, typer.Option("--num-rows", "-n")] = 0,
        stop: Annotated[list[str] | None, typer.Option()] = None,
        text: Annotated[str | None, typer.Argument()] = None,
        is_loud: Annotated[bool, typer.Option("--loud/--quiet")] = False,
    ) -> str:
        return f"{num_rows} {stop} {text}"

    return app


@pytest.mark.parametrize(
    ("arguments", "field"),
    [("-n 1 -n 2", "num_rows"), ("-n 1 text --num-rows=2", "num_rows"), ("--loud --quiet", "loud")],
)
def test_a_flag_of_one_value_has_no_two(arguments: str, field: str) -> None:
    with pytest.raises(InputError) as refusal:
        make_app()(arguments.split(), standalone_mode=False)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ("-n 1 -n 1", "1 None None"),
        ("--num-rows 1 -n1", "1 None None"),
        ("-n 1 --loud --num-rows=1 --loud", "1 None None"),
        ("--stop a -n 3 text --stop b", "3 ['a', 'b'] text"),
    ],
)
def test_a_flag_may_repeat_its_value(arguments: str, parsed: str) -> None:
    assert make_app()(arguments.split(), standalone_mode=False) == parsed


def test_a_single_command_has_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(num_rows: int = 0) -> None:
        """Do nothing."""

    monkeypatch.setattr(sys, "argv", ["worker", "--num-rows", "1", "--num-rows", "2"])
    with pytest.raises(SystemExit) as ended:
        run_command(command)
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "error: --num-rows: expected one value, found several\n")


def test_a_parameters_name_in_a_request_is_that_of_its_long_flag() -> None:
    app = App()

    @app.command()
    def command(as_json: Annotated[bool, typer.Option("--json")] = False, max_len: int = 0) -> None:
        """Do nothing."""

    assert [field_of(parameter) for parameter in typer.main.get_command(app).params] == ["json", "max_len"]
