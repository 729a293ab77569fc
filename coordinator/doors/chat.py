"""`brigade chat`: a conversation in the terminal."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.doors.commands import Leave, run_command
from coordinator.doors.dialogue import Dialogue, Typed
from coordinator.doors.keyboard import Keyboard, taking_interrupts
from coordinator.doors.server import open_server
from coordinator.doors.show import showing
from coordinator.doors.speakers import Figures, ResidentSpeaker, ServerSpeaker, Speaker
from coordinator.resident.ask import Ask, require_utf8
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import open_resident
from worker.errors import BrigadeError, InputError
from worker.process.run import INTERRUPTED

_PROMPT, _MORE = ">>> ", "... "
_MAX_WAIT_S = 600.0


@dataclass(frozen=True)
class Place:
    """Where the model is: at a server, or over a cluster that is opened for it."""

    options: ClusterOptions
    server: str | None = None
    key: str | None = None


async def run_chat(place: Place, manner: Ask, body: Mapping[str, Any], system: str | None) -> int:
    """Talk until standard input ends, or the user leaves; the exit code.

    Args:
        manner: how the model is asked; `body`: the same in a server's words.
    """
    with Keyboard() as keyboard:
        async with _speaker(place, manner, body) as speaker:
            return await Chat(speaker, keyboard, Dialogue(system)).run()


@asynccontextmanager
async def _speaker(place: Place, manner: Ask, body: Mapping[str, Any]) -> AsyncIterator[Speaker]:
    if place.server is not None:
        async with open_server(place.server, place.key) as server:
            yield ServerSpeaker(server, body)
        return
    options = place.options
    frontend = await Frontend.read(options.model, trust_remote_code=options.trust_remote_code)
    if not frontend.has_chat_template:
        raise InputError("model", "this model has no chat template; ask it by `brigade generate`")
    await frontend.prepare(manner)  # what is wrong with it is said before anything is loaded
    async with open_resident(frontend, options, options.context, max_waiting=1, max_wait_s=_MAX_WAIT_S) as model:
        yield ResidentSpeaker(model, manner)


class Chat:
    """One conversation."""

    def __init__(self, speaker: Speaker, keyboard: Keyboard, dialogue: Dialogue) -> None:
        self.dialogue = dialogue
        self.stats = "no answer yet"
        self._speaker = speaker
        self._keyboard = keyboard
        self._console = Console() if keyboard.is_terminal else None
        self._typed = Typed()
        self._answering: asyncio.Task[None] | None = None
        self._is_leaving = False  # Ctrl-C was pressed while nothing was answered, and no line has come since
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._code = 0

    async def run(self) -> int:
        """To the end; the exit code: piped messages that were not answered count."""
        if self._console:
            say(f"{self._speaker.name}; /help lists what else you can type, /exit or Ctrl-D leaves")
        typed = self._typed
        with taking_interrupts(self._interrupt):
            while (line := await self._line(_MORE if typed.is_open else _PROMPT)) is not None:
                message = typed.push(line)
                if message is not None and not await self._take(message):
                    return self._code
            if self._left.done():
                return INTERRUPTED
            if rest := typed.flush():
                await self._take(rest)
        return self._code

    async def _line(self, prompt: str) -> str | None:
        """The next line; None at the end, or where Ctrl-C asks for it."""
        reading = asyncio.create_task(self._keyboard.read(prompt))
        either: list[asyncio.Future[Any]] = [reading, self._left]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._left.done():
            reading.cancel()
            return None
        self._is_leaving = False
        return reading.result()

    async def _take(self, message: str) -> bool:
        """Do what a command says, or answer. Whether to go on."""
        try:
            if message.startswith("/") and "\n" not in message:
                run_command(self, message)
            elif message.strip():
                await self._answer(message)
        except Leave:
            return False
        except BrigadeError as error:
            say(f"error: {error}")
            self._code = max(self._code, 0 if self._console else error.exit_code)
        return True

    async def _answer(self, message: str) -> None:
        """Raises BrigadeError; the question is taken back then, unless it was answered in part."""
        require_utf8("prompt", message)
        self.dialogue.ask(message)
        said: list[str] = []
        self._answering = answering = asyncio.create_task(self._speak(said))
        try:
            await asyncio.wait([answering])
        finally:
            answering.cancel()  # where this task is cancelled itself
            await asyncio.gather(answering, return_exceptions=True)
            self._answering = None
            self.dialogue.answer("".join(said))
        if answering.cancelled():
            say("(interrupted)")
        else:
            answering.result()

    async def _speak(self, said: list[str]) -> None:
        began, first = time.monotonic(), None
        with showing(self._console) as show:
            async with aclosing(self._speaker.stream(self.dialogue.messages())) as answer:
                async for step in answer:
                    if first is None and (step.text or step.reasoning):
                        first = time.monotonic()
                    show.think(step.reasoning)
                    show.say(step.text)
                    said.append(step.text)
                    if step.figures is not None:
                        self.stats = _stats(step.figures, began, first or time.monotonic())

    def _interrupt(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        elif self._is_leaving:
            if not self._left.done():
                self._left.set_result(None)
        else:
            self._is_leaving = True
            self._typed.drop()
            say(f"\n(Ctrl-C again, /exit or Ctrl-D leaves)\n{_PROMPT}")


def _stats(figures: Figures, began: float, first: float) -> str:
    decode_s = time.monotonic() - first
    speed = f", {(figures.num_generated - 1) / decode_s:.1f} tok/s" if decode_s and figures.num_generated > 1 else ""
    recoveries = f"; {figures.num_recoveries} recoveries" if figures.num_recoveries else ""
    return (
        f"prompt of {figures.num_prompt} tokens, {figures.num_reused} of them reused; "
        f"answer of {figures.num_generated} tokens, the first after {first - began:.3f} s{speed}{recoveries}"
    )
