"""`brigade chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import termios
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from coordinator.cli import flags
from coordinator.cli.run import TakeFlags
from coordinator.cli.show import showing, with_prompt_shown
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.engine.bounded import TEMPLATES
from coordinator.sessions.output import Answer, Output
from coordinator.sessions.request import Conversation, RequestSpec, require_text
from worker.errors import BrigadeError, ContextExceeded, InputError
from worker.platform.files import reading, writing
from worker.platform.interrupts import INTERRUPTED, call_soon_or_end
from worker.platform.tasks import cancel_all
from worker.platform.text import counted, to_json
from worker.platform.threads import CallThread

_PROMPT, _MORE = ">>> ", "... "
_QUOTES = '"""'
_DISCARD = b"\x05\x15"  # what is typed to go to the end of a line, and to delete it

ConversationTurn = dict[str, str]
Messages = Sequence[Mapping[str, Any]]
Stream = Callable[[Messages], AsyncGenerator[Output, None]]


def chat(
    ctx: typer.Context,
    *,
    system_prompt: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-m", min=1, help="The most tokens of an answer. (default: as many as fit)"),
    ] = None,
    server: flags.ServerFlags,
    cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.SERVING)],
    sampling: flags.SamplingFlags,
) -> Coroutine[Any, Any, int]:
    """Talk with the model. /help lists the commands; Ctrl-C ends an answer, /exit or Ctrl-D leaves.

    brigade chat --model demo --local 2

    With a running server: brigade chat --server http://localhost:9338
    """
    server.refuse_others(ctx)
    chosen = sampling.chosen()
    if server.server is not None:
        body = chosen | sampling.tokens() | ({"max_tokens": max_tokens} if max_tokens else {})
        return run_chat(served(server, body), system_prompt)
    options = cluster.options()
    TEMPLATES.start()  # in parallel to imports that take a second
    return run_chat(loaded(options, RequestSpec((0,), max_tokens, chosen, **sampling.tokens())), system_prompt)


@asynccontextmanager
async def loaded(options: ClusterOptions, spec: RequestSpec) -> AsyncIterator[tuple[str, Stream]]:
    """Load a model over a cluster; yield its name and a function that answers messages with the parameters of `spec`.

    Raises:
        InputError: the model has no chat template, or cannot serve such requests. BrigadeError: it cannot be loaded.
    """
    from coordinator.engine.engine import open_engine
    from coordinator.engine.inputs import InputProcessor

    inputs = await InputProcessor.read(options)
    if not inputs.has_chat_template:
        raise InputError("model", "this model has no chat template; use `brigade generate`")
    await inputs.make_request(spec)  # errors in it are raised before anything is loaded
    async with open_engine(inputs, options, max_waiting=1) as engine:

        async def stream(messages: Messages) -> AsyncGenerator[Output, None]:
            request = await engine.prepare(replace(spec, prompt=Conversation(tuple(messages))))
            async with aclosing(with_prompt_shown(engine.generate(request), engine, request)) as outputs:
                async for output in outputs:
                    yield output

        yield engine.name, stream


@asynccontextmanager
async def served(given: flags.ServerFlags, body: Mapping[str, Any]) -> AsyncIterator[tuple[str, Stream]]:
    """Connect to a server; yield its model's name and a function that answers messages with the fields of `body`."""
    from coordinator.cli.remote import open_server

    async with open_server(given) as server:
        yield server.name, lambda messages: server.generate(Conversation(tuple(messages)), body)


async def run_chat(model_at: contextlib.AbstractAsyncContextManager[tuple[str, Stream]], system: str | None) -> int:
    """Talk until standard input ends or the user leaves; return the exit code."""
    with Keyboard() as keyboard:
        async with model_at as (name, stream):
            return await Chat(name, stream, keyboard, Dialogue(system)).run()


@dataclass
class Dialogue:
    """The messages of a conversation, with its system prompt."""

    system: str | None = None
    turns: list[ConversationTurn] = field(default_factory=list)

    def messages(self) -> list[ConversationTurn]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer to the last question; if it is empty, remove the question."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def to_json(self) -> str:
        return to_json({"messages": self.messages()}, indent=1) + "\n"

    @classmethod
    def of(cls, text: str) -> Dialogue:
        """Read what `to_json` wrote. Raises InputError for anything else."""
        try:
            messages = [_message(each) for each in json.loads(text)["messages"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InputError("", 'expected {"messages": [{"role": ..., "content": ...}, ...]}') from error
        is_system = bool(messages) and messages[0]["role"] == "system"
        return cls(messages[0]["content"] if is_system else None, messages[is_system:])


def _message(found: Mapping[str, Any]) -> ConversationTurn:
    role, content = found["role"], found["content"]
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise ValueError
    return {"role": role, "content": content}


class Typed:
    """The lines of a message that is being typed: several after a backslash or between quotes."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_quoted = False

    @property
    def is_open(self) -> bool:
        """Whether the message continues with the next line."""
        return bool(self._lines) or self._is_quoted

    def push(self, line: str) -> str | None:
        """Take the next line. Return the message if it is complete."""
        if not self.is_open and line.startswith(_QUOTES):
            self._is_quoted, line = True, line.removeprefix(_QUOTES)
            if line.endswith(_QUOTES):
                return self._end(line.removesuffix(_QUOTES))
            self._lines = [line] if line else []
            return None
        if self._is_quoted:
            is_last, line = line.rstrip().endswith(_QUOTES), line.rstrip().removesuffix(_QUOTES)
        else:
            is_last, line = not line.endswith("\\"), line.removesuffix("\\")
        if is_last:
            return self._end(line)
        self._lines.append(line)
        return None

    def flush(self) -> str | None:
        """Return an incomplete message, if there is one."""
        return self._end("") if self.is_open else None

    def drop(self) -> None:
        self._lines, self._is_quoted = [], False

    def _end(self, line: str) -> str:
        text = "\n".join([*self._lines, line]).strip("\n")
        self.drop()
        return text


class Chat:
    def __init__(self, name: str, stream: Stream, keyboard: Keyboard, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self.file: Path | None = None  # that it was saved in or loaded from
        self._name = name
        self._stream = stream
        self._keyboard = keyboard
        self._console = Console() if keyboard.is_terminal else None
        self._typed = Typed()
        self._answering: asyncio.Task[None] | None = None
        self._last: tuple[Answer, int] | None = None  # the last message's answer, and when it was asked for
        self._interrupted_at: str | None = None  # the line being typed when Ctrl-C was pressed between answers
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._code = 0

    @property
    def stats(self) -> str:
        """A line of statistics of the last message's answer."""
        return "no answer yet" if self._last is None else _stats_line(*self._last)

    async def run(self) -> int:
        """Talk to the end, and return the exit code: not 0 if a piped message was not answered."""
        if self._console:
            say(f"{self._name}; /help lists what else you can type, /exit or Ctrl-D leaves")
        typed, loop = self._typed, asyncio.get_running_loop()
        before = signal.signal(signal.SIGINT, lambda number, frame: call_soon_or_end(loop, self._interrupt))
        try:
            while (line := await self._line(_MORE if typed.is_open else _PROMPT)) is not None:
                message = typed.push(line)
                if message is not None and not await self._take(message):
                    return self._code
            if self._left.done():
                return INTERRUPTED
            if rest := typed.flush():
                await self._take(rest)
            return self._code
        finally:
            signal.signal(signal.SIGINT, before)

    async def _line(self, prompt: str) -> str | None:
        """Return the next line; None at the end of standard input, or after Ctrl-C was pressed twice."""
        reading = asyncio.create_task(self._keyboard.read(prompt))
        either: list[asyncio.Future[Any]] = [reading, self._left]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._left.done():
            reading.cancel()
            return None
        self._interrupted_at = None
        return reading.result()

    async def _take(self, message: str) -> bool:
        """Run a command or answer a message. Return whether to continue."""
        try:
            if message.startswith("/") and "\n" not in message:
                run_chat_command(self, message)
            elif message.strip():
                await self._answer(message)
        except Leave:
            return False
        except BrigadeError as error:
            say(f"error: {error}")
            self._code = max(self._code, 0 if self._console else error.exit_code)
        return True

    async def _answer(self, message: str) -> None:
        """Raises BrigadeError; the question is dropped then, unless a part of its answer came."""
        answer, _ = self._last = Answer(), time.monotonic_ns()
        require_text("prompt", message)
        self.dialogue.ask(message)
        said: list[str] = []
        self._answering = answering = asyncio.create_task(self._speak(answer, said))
        try:
            await asyncio.wait([answering])
        finally:
            await cancel_all(answering)  # if this task itself is cancelled
            self._answering = None
            self.dialogue.answer("".join(said))
        if answering.cancelled():
            say("(interrupted)")
        else:
            answering.result()

    async def _speak(self, answer: Answer, said: list[str]) -> None:
        messages = self.dialogue.messages()
        try:
            with showing(self._console) as show:
                async with aclosing(self._stream(messages)) as outputs:
                    async for output in outputs:
                        answer.add(output)
                        show.think(output.reasoning)
                        show.say(output.content)
                        said.append(output.content)
        except ContextExceeded as error:
            if self._fits_alone(error):
                found, _, _ = error.message.partition("; shorten it")
                raise InputError("conversation", f"{found}; /reset begins a new one") from error
            raise

    def _fits_alone(self, error: ContextExceeded) -> bool:
        """Return whether the last message alone has room, judged by its share of the conversation's letters."""
        *others, last = (len(turn["content"]) for turn in self.dialogue.turns)
        most = error.most / error.num_tokens if error.num_tokens else 0.5  # a server tells no numbers
        return bool(others) and last < most * (sum(others) + last)

    def _interrupt(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        elif self._interrupted_at == (begun := self._keyboard.begun):
            if not self._left.done():
                self._left.set_result(None)
        else:
            self._typed.drop()
            say("\n(Ctrl-C again, /exit or Ctrl-D leaves)")
            print(f"{_PROMPT}{begun}", end="", file=sys.stderr, flush=True)  # from where it is deleted, or stays
            self._interrupted_at = "" if begun and self._keyboard.discard() else begun


def _stats_line(answer: Answer, began: int) -> str:
    """Return the statistics of an answer, which was asked for at this moment, nanoseconds, monotonic."""
    usage, later_s, first_s = answer.usage, answer.later_s, (answer.first_text_at - began) / 1e9
    if not answer.finish_reason:
        if not (answer.tokens or answer.lengths):
            return "no answer to the last message"
        known = f" after {counted(len(answer.tokens), 'token')}" if answer.tokens else ""  # a server sends none
        speed = f", {answer.tokens_per_s:.1f} tok/s" if answer.tokens_per_s else ""
        return f"answer broken off{known}, its first text after {first_s:.3f} s{speed}"
    speed = f", {answer.num_later / later_s:.1f} tok/s" if later_s and answer.num_later > 0 else ""
    recoveries = f"; {counted(usage.num_recoveries, 'recovery', 'recoveries')}" if usage.num_recoveries else ""
    return (
        f"prompt of {counted(usage.num_prompt, 'token')}, {usage.num_reused} of them reused; "
        f"answer of {counted(usage.num_generated, 'token')}, the first after {first_s:.3f} s{speed}{recoveries}"
    )


class Leave(Exception):
    """The user leaves the chat."""


class Command(NamedTuple):
    expects: str
    help: str
    run: Callable[[Chat, str], None]


def run_chat_command(chat: Chat, line: str) -> None:
    """Run the command of a line that begins with a slash.

    Raises:
        InputError: there is no such command, or it failed. Leave: the user leaves the chat.
    """
    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        raise InputError("", f"expected one of {', '.join(COMMANDS)}, found {name}; a message may begin with a space")
    command, rest = COMMANDS[name], rest.strip()
    if bool(rest) != bool(command.expects) and not command.expects.startswith("["):
        raise InputError("", f"expected {name} {command.expects}".rstrip())
    command.run(chat, rest)


def _help(chat: Chat, rest: str) -> None:
    for name, command in COMMANDS.items():
        say(f"{f'{name} {command.expects}':<16} {command.help}")
    say('\\ at the end of a line, or """ before and after several, make them one message; Ctrl-C ends an answer')


def _reset(chat: Chat, rest: str) -> None:
    chat.dialogue, chat.file = Dialogue(chat.dialogue.system), None
    say("the conversation starts anew")


def _system(chat: Chat, rest: str) -> None:
    chat.dialogue.system = system = rest or chat.dialogue.system
    say(f"system prompt: {system}" if system else "no system prompt")


def _save(chat: Chat, rest: str) -> None:
    path = Path(os.path.expanduser(rest))  # as it is where there is no such home
    if path.is_file() and path != chat.file:
        raise InputError("", f"expected a new file, found {path}; give another name, or remove it first")
    with writing("", path):
        path.write_text(chat.dialogue.to_json(), encoding="utf-8")
    chat.file = path
    say(f"saved {counted(len(chat.dialogue.messages()), 'message')} in {path}")


def _load(chat: Chat, rest: str) -> None:
    path = Path(os.path.expanduser(rest))
    with reading("", path):
        text = path.read_text(encoding="utf-8")
    try:
        chat.dialogue = Dialogue.of(text)
    except InputError as error:
        raise InputError("", f"{path}: {error.message}") from error
    chat.file = path
    say(f"loaded {counted(len(chat.dialogue.messages()), 'message')} from {path}")


def _exit(chat: Chat, rest: str) -> None:
    raise Leave


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/reset": Command("", "start a new conversation", _reset),
    "/system": Command("[TEXT]", "show or set the system prompt", _system),
    "/save": Command("FILE", "write the conversation to a new file, or its own, as JSON", _save),
    "/load": Command("FILE", "continue a saved conversation", _load),
    "/stats": Command("", "statistics of the last answer", lambda chat, rest: say(chat.stats)),
    "/exit": Command("", "leave", _exit),
}


class Keyboard:
    """Lines of standard input, typed or piped, read on a thread. Use as a context manager."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._thread = CallThread("keyboard")
        self._settings: list[object] | None = None
        self._line_begun: Callable[[], str] = str

    def __enter__(self) -> Keyboard:
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # makes input() edit lines and keep a history

                self._line_begun = readline.get_line_buffer
            self._settings = termios.tcgetattr(sys.stdin)
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.close(timeout_s=0)  # its thread may be waiting for a line
        if self._settings is not None:  # input() may have changed them
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)  # type: ignore[arg-type]

    @property
    def begun(self) -> str:
        """The line that is being typed, so far as known."""
        return self._line_begun()

    def discard(self) -> bool:
        """Delete the line that is being typed, as if by keys. Return whether the terminal lets us: Linux may not."""
        with contextlib.suppress(OSError):
            for key in _DISCARD:
                fcntl.ioctl(sys.stdin, termios.TIOCSTI, bytes([key]))
            return True
        return False

    async def read(self, prompt: str) -> str | None:
        """Return the next line; None at the end."""
        try:
            return await self._thread.run(partial(input, prompt) if self.is_terminal else _piped_line)
        except EOFError:
            return None


def _piped_line() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode(errors="surrogateescape").rstrip("\r\n")  # as Python decodes arguments
