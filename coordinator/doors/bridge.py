"""`brigade bridge`: requests as lines of standard input, many at once, their answers as lines of standard output."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.doors.bridge_lines import (
    GenerateBody,
    Id,
    Json,
    Line,
    OneChat,
    Said,
    Unreadable,
    cancelled_line,
    done_line,
    error_line,
    parse_line,
    piece_line,
)  # fmt: skip
from coordinator.doors.streams import LineWriter, read_lines
from coordinator.resident.ask import Ask
from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import ResidentModel, open_resident
from coordinator.sessions.answer import Answer
from coordinator.sessions.slots import MOST_WAITING
from coordinator.shapes.body import read
from worker.errors import BrigadeError, InputError
from worker.process.own_code import version_of

_MAX_WAIT_S = 600.0
_CHAT_TOKENS = 4096  # of an answer whose line names no number


async def run_bridge(options: ClusterOptions) -> None:
    """Answer until standard input ends, and then what is under way; or until `quit`, and nothing more.

    Raises:
        BrigadeError: the model cannot be loaded, or its cluster failed for good. BrokenPipeError: nobody reads.
    """
    frontend = await Frontend.read(
        options.model, trust_remote_code=options.trust_remote_code, needs_text=False, max_tokens=_CHAT_TOKENS
    )
    async with open_resident(
        frontend, options, options.context, max_waiting=MOST_WAITING, max_wait_s=_MAX_WAIT_S
    ) as model:
        say(f"{model.name} is loaded: a JSON object per line")
        with LineWriter(sys.stdout) as writer:
            async with aclosing(read_lines(sys.stdin.buffer)) as lines:
                await Bridge(model, writer).run(lines)


class Bridge:
    """The requests under way, by their ids."""

    def __init__(self, model: ResidentModel, writer: LineWriter) -> None:
        self._model = model
        self._writer = writer
        self._running: dict[Id, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, lines: AsyncGenerator[bytes, None]) -> None:
        """Take lines to their end. Raises what no single request is to blame for; all answers end with it."""
        taking = asyncio.create_task(self._take(lines))
        failing = asyncio.create_task(self._model.wait_failed())
        try:
            await asyncio.wait([taking, failing, self._broken], return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                await asyncio.gather(*self._running.values())  # each tells that it failed
            for ended in (self._broken, failing, taking):
                if ended.done():
                    ended.result()
        finally:
            everything = [taking, failing, *self._running.values()]
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    def _ended(self, line_id: Id, task: asyncio.Task[None]) -> None:
        """Forget a request. What its own line cannot tell ends the bridge."""
        if self._running.get(line_id) is task:
            del self._running[line_id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _take(self, lines: AsyncGenerator[bytes, None]) -> None:
        async for text in lines:
            if not text.strip():
                continue
            try:
                line = parse_line(text)
                if line.op == "quit":
                    return
                await self._begin(line)
            except Unreadable as error:
                await self._writer.write(error_line(error.id, error))
        await asyncio.gather(*self._running.values())

    async def _begin(self, line: Line) -> None:
        """Raises Unreadable for an id that another request under way has, or that none has that is to be cancelled."""
        running = self._running.get(line.id)
        if line.op == "info":
            await self._writer.write({"id": line.id, "info": self._info()})
        elif line.op == "cancel":
            if running is None:
                raise Unreadable("id", "expected the id of a request under way, which is to be cancelled", line.id)
            running.cancel()
        elif running is not None:
            raise Unreadable("id", "expected one that no request under way has", line.id)
        else:
            task = self._running[line.id] = asyncio.create_task(self._answer(line))
            task.add_done_callback(partial(self._ended, line.id))
            await asyncio.sleep(0)  # it begins: cancelled before that it would end without a line

    async def _answer(self, line: Line) -> None:
        answer, said = Answer(), Said(is_chat=line.op == "chat")
        try:
            last = await self._stream(line, answer, said)
            told = done_line(line.id, answer, last, said.to_json())
        except BrigadeError as error:
            told = error_line(line.id, error)
        except asyncio.CancelledError:
            told = cancelled_line(line.id, answer, said.to_json())
        await self._writer.write(told)

    async def _stream(self, line: Line, answer: Answer, said: Said) -> Delta:
        task = await self._model.prepare(self._ask(line))
        delta = None
        async with aclosing(self._model.stream(task)) as deltas:
            async for delta in deltas:
                answer.add(delta.piece)
                said.add(delta)
                if piece := piece_line(line.id, delta, is_chat=said.is_chat):
                    await self._writer.write(piece)
        assert delta is not None
        return delta

    def _ask(self, line: Line) -> Ask:
        frontend = self._model.frontend
        if line.op == "generate":
            return read(GenerateBody, line.body).ask(has_template=frontend.has_chat_template)
        if not frontend.has_chat_template:
            raise InputError("messages", "this model has no chat template; use generate")
        return read(OneChat, line.body).ask()

    def _info(self) -> Json:
        model, spec = self._model, self._model.frontend.spec
        standing, plan = model.standing, model.runner.chain.plan
        return {
            "model": model.name,
            "context": model.context,
            "vocab_size": spec.vocab_size,
            "has_chat_template": model.frontend.has_chat_template,
            "state": standing.state.value,
            "why": standing.why,
            "nodes": [{"node": node.name, "start": node.start, "end": node.end} for node in plan.assignments],
            "running": list(self._running),
            "version": version_of("brigade"),
        }
