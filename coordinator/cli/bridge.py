"""`brigade bridge`: takes requests as lines of standard input, and writes answers as lines of standard output."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar

from pydantic import Field, model_validator

from coordinator.api.body import (
    OPENAI_ONLY,
    UNSUPPORTED,
    OpenAISampled,
    TokenIds,
    Unsupported,
    read,
    require_one,
    shown,
)
from coordinator.cli import flags
from coordinator.cli.report import stats_of
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.engine.bounded import TEMPLATES
from coordinator.sessions.admission import MOST_WAITING
from coordinator.sessions.calls import joined_calls
from coordinator.sessions.output import Answer, ToolCall
from coordinator.sessions.request import Conversation, RequestSpec
from worker.errors import BrigadeError, InputError
from worker.platform.installation import version_of
from worker.platform.tasks import cancel_all
from worker.platform.text import Json, json_problem, to_json
from worker.platform.threads import CallThread

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine
    from coordinator.sessions.output import Output

Id = str | int

OPS = ("generate", "chat", "info", "cancel", "quit")
_MOST_BYTES = 64 << 20  # of a line
_LAST_LINES_S = 2.0  # for the last lines of the answers that a signal ends
_CHAT_TOKENS = 4096  # of an answer whose line names no number


def bridge(cluster: Annotated[flags.ClusterFlags, TakeFlags(*flags.SERVING)]) -> Coroutine[Any, Any, None]:
    """Answer requests that come as JSON lines on standard input, many at once, as JSON lines on standard output.

    {"id": "a", "op": "generate", "prompt": "Hi", "max_tokens": 8} gives a line {"id": "a", "text": ..., "tokens": ...}
    per step, then one with "done": true; or one with "error".

    `generate` takes a prompt as `brigade generate` does, or `prompt_tokens`; `chat` takes `messages`; both take the
    parameters of `brigade serve`. `info` describes the model, `cancel` ends the answer with this id, `quit` ends all.
    At the end of standard input, running requests are answered first.
    """
    options = cluster.options()
    TEMPLATES.start()  # in parallel to imports that take a second
    return run_bridge(options)


async def run_bridge(options: ClusterOptions) -> None:
    """Answer until standard input ends and all requests are answered, or until `quit`.

    Raises:
        BrigadeError: the model cannot be loaded, or the cluster failed for good. BrokenPipeError: stdout was closed.
    """
    from coordinator.engine.engine import open_engine
    from coordinator.engine.inputs import InputProcessor

    inputs = await InputProcessor.read(options, needs_text=False, max_tokens=_CHAT_TOKENS)
    async with open_engine(inputs, options, max_waiting=MOST_WAITING) as engine:
        say(f"{engine.name} is loaded: a JSON object per line")
        with closing(CallThread("standard output")) as thread:  # a slow reader does not block the event loop

            async def write(line: Json) -> None:
                text = to_json(line) + "\n"
                await thread.run(lambda: (sys.stdout.write(text), sys.stdout.flush()))

            async with aclosing(read_lines(sys.stdin.buffer)) as lines:
                await Bridge(engine, write).run(lines)


class Bridge:
    """The running requests, by their ids."""

    def __init__(self, engine: Engine, write: Callable[[Json], Awaitable[None]]) -> None:
        """`write` writes a line of standard output. It raises BrokenPipeError if that was closed."""
        self._engine = engine
        self._write = write
        self._running: dict[Id, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, lines: AsyncGenerator[bytes, None]) -> None:
        """Take lines to their end. Raises errors that no single request caused; all answers end with them."""
        taking = asyncio.create_task(self._take(lines))
        failing = asyncio.create_task(self._engine.wait_failed())
        try:
            await asyncio.wait([taking, failing, self._broken], return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                await asyncio.gather(*self._running.values())  # each writes its error line
            for ended in (self._broken, failing, taking):
                if ended.done():
                    ended.result()
        finally:
            # only after `quit` as long as it takes: a signal ends the bridge also while its reader does not read
            within_s = None if taking.done() else _LAST_LINES_S
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await cancel_all(taking, failing, *self._running.values())

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
                await self._write(error_line(error.id, error))
        await asyncio.gather(*self._running.values())

    async def _begin(self, line: Line) -> None:
        """Raises Unreadable for an id that is running already, or for a `cancel` of one that is not."""
        running = self._running.get(line.id)
        if line.op == "info":
            await self._write({"id": line.id, "info": self._info()})
        elif line.op == "cancel":
            if running is None:
                raise Unreadable("id", "expected the id of a request under way, which is to be cancelled", line.id)
            running.cancel()
        elif running is not None:
            raise Unreadable("id", "expected one that no request under way has", line.id)
        else:
            task = self._running[line.id] = asyncio.create_task(self._answer(line))
            task.add_done_callback(partial(self._ended, line.id))
            await asyncio.sleep(0)  # let it begin: a task cancelled before that would end without a line

    def _ended(self, line_id: Id, task: asyncio.Task[None]) -> None:
        """Forget a request. An error that was not written as its line ends the bridge."""
        del self._running[line_id]
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _answer(self, line: Line) -> None:
        from coordinator.engine.inputs import renaming

        reply = Reply(line.id, is_chat=line.op == "chat")
        try:
            spec = self._spec(line)
            name = "messages" if reply.is_chat else "prompt_tokens" if isinstance(spec.prompt, tuple) else "prompt"
            with renaming({"prompt": name}):
                request = await self._engine.prepare(spec)
            async with aclosing(self._engine.generate(request)) as outputs:
                async for output in outputs:
                    if piece := reply.add(output):
                        await self._write(piece)
            told = reply.last_line(output.finish_reason, _stats(reply.answer))
        except BrigadeError as error:
            told = error_line(line.id, error)
        except asyncio.CancelledError:
            told = reply.last_line("cancelled", None)
        await self._write(told)

    def _spec(self, line: Line) -> RequestSpec:
        """Raises InputError for a wrong body, or for messages if the model has no chat template."""
        has_template = self._engine.inputs.has_chat_template
        if line.op == "generate":
            return read(GenerateBody, line.body).to_spec(has_template=has_template)
        if not has_template:
            raise InputError("messages", "this model has no chat template; use generate")
        from coordinator.api.openai import ChatBody

        body = read(ChatBody, line.body)
        if body.n != 1:
            raise InputError("n", f"expected 1, got {body.n}")
        if body.logprobs:
            raise InputError("logprobs", "expected none: the lines of an answer have no log-probabilities")
        return body.to_spec()

    def _info(self) -> Json:
        engine, status = self._engine, self._engine.status
        return {
            "model": engine.name,
            "context": engine.context,
            "vocab_size": engine.inputs.spec.vocab_size,
            "has_chat_template": engine.inputs.has_chat_template,
            "state": status.state.value,
            "why": status.why,
            "nodes": [{"node": n.name, "start": n.start, "end": n.end} for n in engine.chain.plan.assignments],
            "running": list(self._running),
            "version": version_of("brigade"),
        }


_NOT_GENERATED = ("logprobs", "n", "response_format")


class GenerateBody(OpenAISampled):
    """The body of `generate`: a prompt, as for `brigade generate`, or token ids."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | {name: OPENAI_ONLY[name] for name in _NOT_GENERATED}
    prompt: Annotated[str, Field(min_length=1)] | None = None
    prompt_tokens: TokenIds | None = None
    system_prompt: str | None = None
    raw: bool = False
    max_tokens: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _agree(self) -> GenerateBody:
        require_one(self, "prompt", "prompt_tokens")
        if self.system_prompt and (self.raw or self.prompt is None):
            raise ValueError("system_prompt is expected only with a prompt that is not raw")
        return self

    def to_spec(self, *, has_template: bool) -> RequestSpec:
        """Return the request: a conversation if the model has a chat template."""
        prompt = self.prompt if self.prompt_tokens is None else self.prompt_tokens
        assert prompt is not None
        if isinstance(prompt, str) and has_template and not self.raw:
            return self.make_spec(Conversation.of(prompt, self.system_prompt), max_tokens=self.max_tokens)
        return self.make_spec(prompt, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Line:
    """A line that was read: the fields of every op, and the rest."""

    id: Id
    op: str
    body: Json


class Unreadable(InputError):
    """A line that cannot be read; `id` is its own, if it has a valid one."""

    def __init__(self, field: str, message: str, found_id: Id | None = None) -> None:
        super().__init__(field, message)
        self.id = found_id


def parse_line(text: bytes) -> Line:
    """Raises Unreadable."""
    if len(text) > _MOST_BYTES:
        raise Unreadable("", f"expected a line of at most {_MOST_BYTES} bytes")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable("", f"expected a JSON object, found something else ({json_problem(error)})") from error
    if not isinstance(body, dict):
        raise Unreadable("", f"expected a JSON object, found {shown(body)}")
    found = body.pop("id", None)
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise Unreadable("id", "expected a text or a whole number, by which the lines of its answer go")
    op = body.pop("op", None)
    if op not in OPS:
        raise Unreadable("op", f"expected one of {', '.join(OPS)}, found {shown(op)}", found)
    return Line(found, op, body)


@dataclass
class Reply:
    """The lines of one answer: those of a chat separate content, reasoning and tool calls."""

    id: Id
    is_chat: bool
    answer: Answer = field(default_factory=Answer)
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)  # in pieces

    def add(self, output: Output) -> Json | None:
        """Take an output in, and return its line; None if there is nothing to write."""
        text, tokens = output.content if self.is_chat else output.text, [token.token for token in output.tokens]
        self.answer.add(output)
        self.text += text
        self.reasoning += output.reasoning
        self.tool_calls += output.tool_calls
        parts = self._chat_parts(output.reasoning, output.tool_calls)
        return {"id": self.id, "text": text, "tokens": tokens, **parts} if parts or text or tokens else None

    def last_line(self, finish_reason: str | None, stats: Json | None) -> Json:
        """Return the line that ends the answer."""
        done = {"id": self.id, "done": True, "finish_reason": finish_reason, "text": self.text}
        return {
            **done,
            **self._chat_parts(self.reasoning, joined_calls(self.tool_calls)),
            "tokens": self.answer.tokens,
            "stats": stats,
        }

    def _chat_parts(self, reasoning: str, calls: Sequence[ToolCall]) -> Json:
        """Return the fields of a chat's line that are not empty."""
        found = {"reasoning": reasoning, "tool_calls": [asdict(call) for call in calls]} if self.is_chat else {}
        return {name: value for name, value in found.items() if value}


def _stats(answer: Answer) -> Json:
    """Return the `stats` of a line; stages are not asked for each of many requests."""
    found = {"prompt_tokens": answer.usage.num_prompt, "reused_tokens": answer.usage.num_reused, **stats_of(answer)}
    return {name: value for name, value in found.items() if name not in ("peak_memory_bytes", "cache_bytes")}


def error_line(line_id: Id | None, error: BrigadeError) -> Json:
    """Return the line of an error, which ends an answer."""
    field = error.field if isinstance(error, InputError) and error.field else None
    message = error.message if field else str(error)
    return {"id": line_id, "error": {"message": message, "field": field}}


async def read_lines(stream: BinaryIO) -> AsyncGenerator[bytes, None]:
    """Yield every line as it comes, without its end; only the beginning of one that is too long."""

    def read_line() -> bytes:
        line = rest = stream.readline(_MOST_BYTES + 1)
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(_MOST_BYTES)
        return line

    thread = CallThread("standard input")
    try:
        while line := await thread.run(read_line):
            yield line.rstrip(b"\r\n")
    finally:
        thread.close(timeout_s=0)  # it may wait for a line that never comes
