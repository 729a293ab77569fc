"""`brigade batch`: answers a file of requests, as many at once as fit, into another file; resumable."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from coordinator.cli import flags
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import TokenReport, say, show_tokens, telling_interrupts
from coordinator.engine.bounded import TEMPLATES
from worker.errors import BrigadeError, InputError, NodeBusy, PoisonRequest, QueueFull, StageLost, again
from worker.platform.files import open_locked, reading, writing
from worker.platform.tasks import background, for_each
from worker.platform.text import Json, counted, json_bytes, json_problem

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine


T = TypeVar("T")

_MOST_AT_ONCE = 128  # requests that run or wait for memory
MAX_WAIT_S = 7 * 86400.0  # for memory: nothing waits for a single answer
_REPORT_S = 1.0  # between reports of tokens
_RETRY_S = 1.0  # between looks at whether the cluster accepts requests again
_MOST_PROBLEMS = 10  # that are printed
_BAD_INPUT, _FAILED = 2, 3
BEGIN = b'{"id": "batch_req_'  # of an answer's line


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", show_default=False, help="Request lines.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Answer lines are appended to this file.")
    ],
    *,
    max_tokens: flags.DefaultMaxTokens = 4096,
    cluster: flags.ClusterFlags,
) -> Coroutine[Any, Any, int]:
    """Answer a file of requests, as many at once as memory allows, into another file, one line each.

    Requests are lines in the format of OpenAI's batches: {"custom_id": "a", "method": "POST", "url":
    "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 100}}, or with /v1/completions. The field `model`
    is ignored.

    Answers are written as they finish. Run again with the same files, the command continues where it stopped: requests
    whose custom_id is in the output are skipped, also if they failed. A failed request and a line that is no request
    are lines with an error; the exit code is then 2 (wrong request) or 3. Requests wait while a worker restarts; if the
    cluster fails for good, the command ends with 3 and those without an answer have no line.

    brigade batch requests.jsonl -o answers.jsonl --model demo --local 2

    Many requests on Macs of different speeds: brigade batch in.jsonl -o out.jsonl --config cluster.yaml --objective
    throughput
    """
    if "-" in (str(source), str(output)):
        raise InputError("", "expected files of requests and answers, by which the command continues, found -")
    flags.require_other_file("output", output, source)
    options = cluster.options()
    TEMPLATES.start()  # in parallel to imports that take a second
    return run_batch(options, source, output, max_tokens)


async def run_batch(options: ClusterOptions, source: Path, target: Path, max_tokens: int) -> int:
    """Answer all requests that have no answer in `target` yet, and return the exit code.

    Args:
        max_tokens: the limit of an answer whose request sets none.
    Raises:
        InputError: a file cannot be read or written. BrigadeError: the model cannot be loaded, or the cluster failed
            for good; the answers so far are in the file.
    """
    from coordinator.engine.engine import open_engine
    from coordinator.engine.inputs import InputProcessor

    requests = read_requests(source)
    if not requests:
        say(f"{source} has no requests")
    wrong = [entry for entry in requests if entry.problem]
    code = _BAD_INPUT if wrong else 0
    with open_answers(target, key_and_status, BEGIN) as answers:
        for entry in wrong[:_MOST_PROBLEMS]:
            say(f"{source}, line {entry.number}: {entry.problem}")
        if len(wrong) > _MOST_PROBLEMS:
            say(f"and {counted(len(wrong) - _MOST_PROBLEMS, 'line')} more")
        entries = [entry for entry in requests if entry.key not in answers.known]
        num_known = len(requests) - len(entries)
        failed = [status for entry in requests if (status := answers.known.get(entry.key, 200)) >= 400]
        if num_known:
            errors = f", {len(failed)} of them with an error" if failed else ""
            say(f"{target} has the answers to {num_known} of {counted(len(requests), 'request')}{errors}")
        code = max([code, *map(_exit_code, failed)])
        refused = [entry for entry in entries if entry.problem]
        for entry in refused:
            answers.add(_failed(entry, InputError("", entry.problem)))
        entries = [entry for entry in entries if not entry.problem]
        if not entries:
            return code
        inputs = await InputProcessor.read(options, max_tokens=max_tokens)
        async with open_engine(inputs, options, max_waiting=_MOST_AT_ONCE, max_wait_s=MAX_WAIT_S) as engine:
            with show_tokens("answered", len(requests), done=num_known + len(refused)) as report:
                run = BatchRun(engine, answers, report, Counter([_BAD_INPUT] * len(refused)), len(refused))
                with telling_interrupts(partial(run.interrupted, target)):
                    await run.answer_all(entries)
    say(run.summary(target))
    return max([code, *run.codes])


def _exit_code(status: int) -> int:
    """Return the exit code for a request that failed with this HTTP status."""
    return _BAD_INPUT if status == 400 else _FAILED


@dataclass
class BatchRun:
    """One run over the requests without an answer."""

    engine: Engine
    answers: Answers[int]  # with their HTTP status
    report: TokenReport
    codes: Counter[int] = field(default_factory=Counter)  # exit codes of what failed
    num_answered: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        """The tokens made so far, also of answers that have not ended."""
        return self.engine.stats.total("generation_tokens")

    async def answer_all(self, entries: list[BatchEntry]) -> None:
        """Answer all entries, a limited number at a time."""
        async with background(self._report_tokens()):
            await for_each(entries, self._add_line_of, most=_MOST_AT_ONCE)

    async def _report_tokens(self) -> None:
        """Report tokens as they come: of many answers at once none may end for long."""
        told = 0
        while True:
            await asyncio.sleep(_REPORT_S)
            before, told = told, self.num_tokens
            self.report(0, told - before)

    async def _add_line_of(self, entry: BatchEntry) -> None:
        try:
            line = _line(entry, 200, await self._answer(entry))
        except BrigadeError as error:
            self._require_running()
            line = _failed(entry, error)
            self.codes[_exit_code(line["response"]["status_code"])] += 1
        self.answers.add(line)
        self.num_answered += 1
        self.report(1, 0)

    def _require_running(self) -> None:
        """Raise the engine's failure, if it failed: it ends all requests, and another run may answer them."""
        failure = self.engine.failure
        if failure is not None:
            raise again(failure)

    async def _answer(self, entry: BatchEntry) -> Json:
        """Return the body of the answer. Raises an error of the request, or the engine's failure."""
        if entry.method != "POST" or entry.url not in ROUTES:
            found = f"{entry.method} {entry.url}"
            raise InputError("url", f"expected POST to {' or '.join(ROUTES)}, found {found}")
        while True:
            try:
                return await ROUTES[entry.url](self.engine, entry.body)
            except PoisonRequest:
                raise
            except (NodeBusy, QueueFull, StageLost):  # of the cluster and not of the request: try again
                await self._wait_accepting()

    async def _wait_accepting(self) -> None:
        """Wait until the cluster accepts requests again. Raises the engine's failure."""
        while True:
            self._require_running()
            await asyncio.sleep(_RETRY_S)
            if self.engine.chain.draining is None and self.engine.num_waiting < _MOST_AT_ONCE:
                return

    def interrupted(self, target: Path) -> str:
        """Return the message for an interrupted run."""
        return f"interrupted: {self.summary(target)}; the same command continues with the others"

    def summary(self, target: Path) -> str:
        took_s = time.monotonic() - self.began
        failed = f", {self.codes.total()} of them with an error" if self.codes else ""
        speed = f"{counted(self.num_tokens, 'token')} in {took_s:.1f} s, {self.num_tokens / took_s:.1f} tok/s"
        return f"{counted(self.num_answered, 'request')} answered{failed} in {target}: {speed}"


async def _answered(engine: Engine, given: Json, *, is_chat: bool) -> Json:
    """Return a whole answer without the `brigade` object, which batch files do not have."""
    from coordinator.api.body import read
    from coordinator.api.completions import CompletionAnswer, CompletionBody
    from coordinator.api.openai import ChatAnswer, ChatBody, OpenAIAnswer

    answer: OpenAIAnswer
    if is_chat:
        answer = ChatAnswer(read(ChatBody, given), engine.name)
    else:
        answer = CompletionAnswer(read(CompletionBody, given), engine.name)
    whole = await answer.collect(engine, await answer.prepare(engine.inputs))
    return {name: value for name, value in whole.items() if name != "brigade"}


ROUTES: dict[str, Callable[[Engine, Json], Awaitable[Json]]] = {
    "/v1/chat/completions": partial(_answered, is_chat=True),
    "/v1/completions": partial(_answered, is_chat=False),
}


def _line(entry: BatchEntry, status: int, body: Json) -> Json:
    """Return the line of an answer in the format of OpenAI's batch files."""
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {"id": entry.id, "custom_id": entry.custom_id, "response": response, "error": None}


def _failed(entry: BatchEntry, error: BrigadeError) -> Json:
    """Return the line of a failed request: its error is in the response and in the field `error`."""
    from coordinator.api.errors import http_error

    found = http_error(error)
    said = {"code": found.code, "message": f"line {entry.number}: {found.message}"}
    return _line(entry, found.status, {**found.to_openai()}) | {"error": said}


@dataclass(frozen=True)
class BatchEntry:
    """One line of the input: a request, or the problem that makes it none."""

    number: int  # of its line
    custom_id: str | None  # None: it has none, or that of another line
    method: str = "POST"
    url: str = ""
    body: Json = field(default_factory=dict)
    problem: str = ""
    id: str = field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")  # of its answer

    @property
    def key(self) -> str:
        """The id by which another run knows that this line has an answer."""
        return self.id if self.custom_id is None else self.custom_id


def read_requests(path: Path) -> list[BatchEntry]:
    """Return the entries of all lines that are not empty. Raises InputError if the file cannot be read."""
    entries: dict[str, BatchEntry] = {}
    with reading("", path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            entry = _entry(number, line)
            if first := entries.get(entry.key):
                said = f"custom_id {entry.custom_id!r} is that of line {first.number} already"
                entry = _wrong_entry(number, line, said)
            entries[entry.key] = entry
    return [*entries.values()]


def _entry(number: int, line: bytes) -> BatchEntry:
    try:
        found = json.loads(line.decode("utf-8-sig", "surrogatepass"))  # of bytes it would guess the encoding
    except (ValueError, RecursionError) as error:
        return _wrong_entry(number, line, f"expected a JSON object, found something else ({json_problem(error)})")
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    if not isinstance(custom_id, str):
        return _wrong_entry(number, line, "expected a JSON object with a custom_id, a text")
    if not isinstance(found.get("body"), dict):
        return BatchEntry(number, custom_id, problem="expected a body, an object")
    return BatchEntry(number, custom_id, str(found.get("method", "POST")), str(found.get("url")), found["body"])


def _wrong_entry(number: int, line: bytes, problem: str) -> BatchEntry:
    """Return the entry of a line without a custom_id of its own: its id is the same in each run."""
    whole = line.removesuffix(b"\n") + b"\n"  # a later run may find a line behind the last one
    digest = hashlib.sha256(b"%d %s" % (number, whole)).hexdigest()
    return BatchEntry(number, None, problem=problem, id=f"batch_req_{digest[:32]}")


def key_and_status(line: Json) -> tuple[str, int]:
    """Return the key of an answer's entry, and the answer's HTTP status; 200 if it has neither that nor an error."""
    response = line.get("response") or {}
    status = int(response.get("status_code", 500 if line.get("error") else 200))
    return str(line["id"] if line["custom_id"] is None else line["custom_id"]), status


class Answers(Generic[T]):
    """The append-only file of answers. Made by `open_answers`."""

    def __init__(self, path: Path, descriptor: int, known: Mapping[str, T]) -> None:
        self.known = known  # what was read of each answer that the file held, by its key
        self._path, self._descriptor = path, descriptor

    def add(self, line: Json) -> None:
        """Add a line. Raises InputError if there is no room for it, or the file was removed."""
        rest = memoryview(json_bytes(line) + b"\n")
        with writing("output", self._path):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was removed, with the answers that it held")


@contextmanager
def open_answers(path: Path, read: Callable[[Json], tuple[str, T]], begin: bytes) -> Iterator[Answers[T]]:
    """Open or create the file; an incomplete last line of an answer is cut off.

    Args:
        read: returns the key of a line, and what is to be known of it; it raises ValueError, LookupError, TypeError or
            AttributeError for what is no answer.
        begin: of the lines that are written: a torn line alone is cut off only if it begins so.
    Raises:
        InputError: the file cannot be written or locked, another run writes it, or it holds something else.
    """
    descriptor = open_locked("output", path, 0o644)
    try:
        known, end = _known(path, read, begin)
        os.ftruncate(descriptor, end)
        yield Answers(path, descriptor, known)
    finally:
        os.close(descriptor)


def _known(path: Path, read: Callable[[Json], tuple[str, T]], begin: bytes) -> tuple[dict[str, T], int]:
    """Return what is known of all complete lines, by their keys, and the position where these lines end."""
    known: dict[str, T] = {}
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            is_ours = number > 1 or line.startswith(begin) or begin.startswith(line)
            if is_ours and not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                key, found = read(json.loads(line))
                known[key] = found
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                said = "expected the answers of an earlier run, found something else"
                raise InputError("output", f"{path}, line {number}: {said}; give another file") from None
    return known, end
