"""What can be typed in a chat beside messages: `/help` and its like."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from coordinator.cluster.progress import say
from coordinator.doors.dialogue import Dialogue
from worker.errors import InputError


class Leave(Exception):
    """The user wants to go."""


class Talk(Protocol):
    """What commands reach of a chat."""

    dialogue: Dialogue
    stats: str


class Command(NamedTuple):
    """One of them."""

    expects: str
    help: str
    run: Callable[[Talk, str], None]


def run_command(talk: Talk, line: str) -> None:
    """Raises InputError for one that there is not, or that cannot be done. Leave: the user wants to go."""
    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        raise InputError("", f"expected one of {', '.join(COMMANDS)}, found {name}; a message may begin with a space")
    command, rest = COMMANDS[name], rest.strip()
    if bool(rest) != bool(command.expects) and not command.expects.startswith("["):
        raise InputError("", f"expected {name} {command.expects}".rstrip())
    command.run(talk, rest)


def _help(talk: Talk, rest: str) -> None:
    for name, command in COMMANDS.items():
        say(f"{f'{name} {command.expects}':<16} {command.help}")
    say('\\ at the end of a line, or """ before and after several, make them one message; Ctrl-C ends an answer')


def _reset(talk: Talk, rest: str) -> None:
    talk.dialogue = Dialogue(talk.dialogue.system)
    say("forgotten what was said")


def _system(talk: Talk, rest: str) -> None:
    if rest:
        talk.dialogue.system = rest
    say(
        f"the model is told first: {talk.dialogue.system}"
        if talk.dialogue.system
        else "the model is told nothing first"
    )


def _save(talk: Talk, rest: str) -> None:
    path = Path(rest).expanduser()
    try:
        path.write_text(talk.dialogue.to_json(), encoding="utf-8")
    except OSError as error:
        raise InputError("", f"cannot write {path}: {error.strerror}") from error
    say(f"saved {len(talk.dialogue.messages())} messages in {path}")


def _load(talk: Talk, rest: str) -> None:
    path = Path(rest).expanduser()
    try:
        talk.dialogue = Dialogue.of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("", f"{path} cannot be read: {error}") from error
    except InputError as error:
        raise InputError("", f"{path}: {error.message}") from error
    say(f"loaded {len(talk.dialogue.messages())} messages from {path}")


def _stats(talk: Talk, rest: str) -> None:
    say(talk.stats)


def _exit(talk: Talk, rest: str) -> None:
    raise Leave


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/reset": Command("", "forget what was said", _reset),
    "/system": Command("[TEXT]", "what the model is told before the conversation", _system),
    "/save": Command("FILE", "write the conversation to a file, as JSON", _save),
    "/load": Command("FILE", "go on with one that was saved", _load),
    "/stats": Command("", "what the last answer took", _stats),
    "/exit": Command("", "leave", _exit),
}
