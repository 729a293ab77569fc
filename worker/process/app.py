"""The typer app that the commands are made of: -h is --help, and a flag that takes one value is given once."""

from typing import Any

import typer
from typer.core import TyperCommand

from worker.errors import InputError
from worker.process.interrupts import find_compiler


class OnceEach(TyperCommand):
    """A command that refuses a flag given twice, of which only the last would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises InputError for such a flag, and what the parser raises."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in self.params:
            if given.count(parameter) > 1 and not getattr(parameter, "multiple", False):
                raise InputError(field_of(parameter), "expected once, found it twice")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run it; last of all what has to be done before it makes a thread."""
        find_compiler()
        return super().invoke(ctx)


class App(typer.Typer):
    """Commands that each take a flag once, with help by -h too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            add_completion=False,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(self, name: str | None = None, *, cls: type[TyperCommand] | None = OnceEach, **settings: Any) -> Any:
        return super().command(name, cls=cls, **settings)


def field_of(parameter: Any) -> str:
    """The name that a request gives to what this flag says."""
    longest = max(parameter.opts, key=len)
    return str(longest.lstrip("-").replace("-", "_"))
