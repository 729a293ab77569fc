"""`brigade batch`: a file of requests, as many at once as fit, each answer a line of another file, resumable."""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.parse import chosen_cluster
from coordinator.cli.serve import DefaultMaxTokens
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import TokenReport, say, show_tokens, telling_interrupts
from coordinator.planning.recovery import USUAL
from worker.errors import BrigadeError, InputError
from worker.platform.text import json_bytes

if TYPE_CHECKING:
    from coordinator.engine.engine import Engine


Json = dict[str, Any]

_MOST_AT_ONCE = 128  # requests that are under way or wait for memory
_MAX_WAIT_S = 7 * 86400.0  # for memory: no reader waits for a single answer
_MOST_PROBLEMS = 10  # that are said
_BAD_INPUT, _FAILED = 2, 3


def batch(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", show_default=False, help="Request lines.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Answer lines are added to this file.")
    ],
    max_tokens: DefaultMaxTokens = 4096,
    config: flags.Config = None,
    model: flags.Model = None,
    local: flags.Local = None,
    layers: flags.Layers = None,
    objective: flags.Aims = "latency",
    context: flags.Context = None,
    trust_remote_code: flags.TrustRemoteCode = False,
    check_finite: flags.CheckFinite = False,
    rejoin_timeout: flags.RejoinTimeout = USUAL.rejoin_s,
    recovery_timeout: flags.RecoveryTimeout = USUAL.recovery_s,
) -> int:
    """Answer a file of requests, as many at once as there is memory for, each as a line of another file.

    A request is a line as OpenAI's batches have them: {"custom_id": "a", "method": "POST", "url":
    "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 100}}, or with /v1/completions. Its `model` is not
    looked at.

    Answers come in the order in which they end. Run again with the same files, it goes on where it stopped: requests
    whose custom_id the output has are not asked again, whether they failed or not. A request that fails is a line with
    an error; the exit code is then 2 (wrong request) or 3.

    brigade batch requests.jsonl -o answers.jsonl --model demo --local 2

    Many requests on Macs of different speeds: brigade batch in.jsonl -o out.jsonl --config cluster.yaml --objective
    throughput
    """
    if source.exists() and output.exists() and output.samefile(source):
        raise InputError("output", "expected another file than that of the requests")
    options = chosen_cluster(ctx)

    from coordinator.engine.bounded import TEMPLATES

    TEMPLATES.start()  # beside the imports below, which take a second
    from coordinator.cli.run import run_async

    return run_async(run_batch(options, source, output, max_tokens))


async def run_batch(options: ClusterOptions, source: Path, target: Path, max_tokens: int) -> int:
    """Answer all requests that `target` has no answer to. Return the exit code.

    Args:
        max_tokens: of an answer whose request names no number.

    Raises:
        InputError: a file cannot be read or written. BrigadeError: the model cannot be loaded, or its cluster failed
            for good: what was answered until then is in the file.
    """
    from coordinator.engine.engine import open_engine
    from coordinator.engine.inputs import InputProcessor

    requests, problems = read_requests(source)
    for problem in problems[:_MOST_PROBLEMS]:
        say(problem)
    if len(problems) > _MOST_PROBLEMS:
        say(f"and {len(problems) - _MOST_PROBLEMS} lines more")
    code = _BAD_INPUT if problems else 0
    with open_answers(target) as answers:
        entries = [entry for entry in requests if entry.custom_id not in answers.known]
        num_known = len(requests) - len(entries)
        failed = [status for entry in requests if (status := answers.known.get(entry.custom_id, 200)) >= 400]
        if num_known:
            beside = f", {len(failed)} of them with an error" if failed else ""
            say(f"{target} has the answers to {num_known} of {len(requests)} requests{beside}")
        code = max([code, *map(_exit_code, failed)])
        if not entries:
            return code
        inputs = await InputProcessor.read(
            options.model, trust_remote_code=options.trust_remote_code, max_tokens=max_tokens
        )
        async with open_engine(
            inputs, options, options.context, max_waiting=_MOST_AT_ONCE, max_wait_s=_MAX_WAIT_S
        ) as engine:
            with show_tokens("answered", len(requests), done=num_known) as report:
                run = Run(engine, answers, report)
                with telling_interrupts(partial(run.interrupted, target)):
                    await run.answer_all(entries)
    say(run.summary(target))
    return max([code, *run.codes])


def _exit_code(status: int) -> int:
    """Return the exit code that a request makes which failed with this HTTP status."""
    return _BAD_INPUT if status == 400 else _FAILED


@dataclass
class Run:
    """One run over the requests that have no answer yet."""

    engine: Engine
    answers: Answers
    report: TokenReport
    codes: Counter[int] = field(default_factory=Counter)  # exit codes of what failed
    num_answered: int = 0
    num_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    async def answer_all(self, entries: list[BatchEntry]) -> None:
        """Answer the first ones; whenever one has ended another one begins."""
        from coordinator.cluster.together import together

        left = iter(entries)
        await together(*(self._answer_in_turn(left) for _ in entries[:_MOST_AT_ONCE]))

    async def _answer_in_turn(self, left: Iterator[BatchEntry]) -> None:
        for entry in left:
            try:
                body = await self._answer(entry)
                told, num_tokens = _told(entry, 200, body), body["usage"]["completion_tokens"]
            except BrigadeError as error:
                self._require_running()
                told, num_tokens = _failed(entry, error), 0
                self.codes[_exit_code(told["response"]["status_code"])] += 1
            self.answers.add(told)
            self.num_answered += 1
            self.num_tokens += num_tokens
            self.report(1, num_tokens)

    def _require_running(self) -> None:
        """Raise the failure that ended all requests: none of them caused it, and another run may answer them."""
        failure = self.engine.failure
        if failure is not None:
            raise failure.again() if isinstance(failure, BrigadeError) else failure

    async def _answer(self, entry: BatchEntry) -> Json:
        if entry.method != "POST" or entry.url not in ROUTES:
            found = f"{entry.method} {entry.url}"
            raise InputError("url", f"expected POST to {' or '.join(ROUTES)}, found {found}")
        return await ROUTES[entry.url](self.engine, entry.body)

    def interrupted(self, target: Path) -> str:
        """Return what is said of a run that does not come to its end."""
        return f"interrupted: {self.summary(target)}; the same command goes on with the others"

    def summary(self, target: Path) -> str:
        took_s = time.monotonic() - self.began
        failed = f", {sum(self.codes.values())} of them with an error" if self.codes else ""
        speed = f"{self.num_tokens} tokens in {took_s:.1f} s, {self.num_tokens / took_s:.1f} tok/s"
        return f"{self.num_answered} requests answered{failed} in {target}: {speed}"


async def _chat(engine: Engine, given: Json) -> Json:
    from coordinator.api.body import read
    from coordinator.api.openai import ChatAnswer, ChatBody

    return await _answered(engine, ChatAnswer(read(ChatBody, given), engine.name))


async def _completions(engine: Engine, given: Json) -> Json:
    from coordinator.api.body import read
    from coordinator.api.completions import CompletionAnswer, CompletionBody

    return await _answered(engine, CompletionAnswer(read(CompletionBody, given), engine.name))


async def _answered(engine: Engine, answer: Any) -> Json:
    """Return a whole answer, without our own figures, which batch files do not have."""
    from coordinator.engine.engine import collect

    whole = answer.whole(await collect(engine, await answer.prepare(engine)))
    return {name: value for name, value in whole.items() if name != "brigade"}


ROUTES: dict[str, Callable[[Engine, Json], Awaitable[Json]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
}


def _told(entry: BatchEntry, status: int, body: Json) -> Json:
    """Return the line of an answer, as OpenAI's batch files have it."""
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": entry.custom_id, "response": response, "error": None}


def _failed(entry: BatchEntry, error: BrigadeError) -> Json:
    """Return the line of a request that cannot be answered: both as a response and as an error."""
    from coordinator.api.errors import http_error

    found = http_error(error)
    said = {"code": found.code, "message": f"line {entry.number}: {found.message}"}
    return _told(entry, found.status, {**found.to_openai()}) | {"error": said}


@dataclass(frozen=True)
class BatchEntry:
    """One request."""

    number: int  # of its line
    custom_id: str
    method: str
    url: str
    body: Json


def read_requests(path: Path) -> tuple[list[BatchEntry], list[str]]:
    """Return all requests that can be read, and what is wrong with the other lines.

    Raises:
        InputError: the file cannot be read.
    """
    entries: dict[str, BatchEntry] = {}
    problems = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = _entry(number, line)
                    if entry.custom_id in entries:
                        first = entries[entry.custom_id].number
                        raise ValueError(f"custom_id {entry.custom_id!r} is that of line {first} already")
                    entries[entry.custom_id] = entry
                except ValueError as error:
                    problems.append(f"{path}, line {number}: {error}; left out")
    except OSError as error:
        raise InputError("", f"{path} cannot be read: {error.strerror}") from error
    return [*entries.values()], problems


def _entry(number: int, line: bytes) -> BatchEntry:
    """Raises ValueError for a line that is no request, or has no id by which its answer could be known."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, found something else ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("custom_id"), str):
        raise ValueError("expected a JSON object with a custom_id, a text")
    body = found.get("body")
    if not isinstance(body, dict):
        raise ValueError("expected a body, an object")
    return BatchEntry(number, found["custom_id"], str(found.get("method", "POST")), str(found.get("url")), body)


class Answers:
    """The file of answers, which only grows. Made by `open_answers`."""

    def __init__(self, descriptor: int, known: Mapping[str, int]) -> None:
        self.known = known  # the ids that it had when it was opened, with the HTTP status of each answer
        self._descriptor = descriptor

    def add(self, line: Json) -> None:
        """Add a line. Raises OSError if there is no room for it."""
        rest = memoryview(json_bytes(line) + b"\n")
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


@contextmanager
def open_answers(path: Path) -> Iterator[Answers]:
    """Open the file, or make it; a line at its end that was not written whole is cut off.

    Raises:
        InputError: it cannot be written or locked, another run writes it, or it holds something else.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise InputError("output", f"cannot write {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("output", f"another run writes {path}") from None
        except OSError as error:
            raise InputError("output", f"cannot lock {path}: {error.strerror}") from error
        known, end = _known(path)
        os.ftruncate(descriptor, end)
        yield Answers(descriptor, known)
    finally:
        os.close(descriptor)


def _known(path: Path) -> tuple[dict[str, int], int]:
    """Return the ids of all whole lines, with their status, and the position at which these lines end."""
    known: dict[str, int] = {}
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                found = json.loads(line)
                known[str(found["custom_id"])] = _status(found)
            except (ValueError, LookupError, TypeError, AttributeError):
                said = "expected the answers of an earlier run, found something else"
                raise InputError("output", f"{path}, line {number}: {said}; give another file") from None
    return known, end


def _status(line: Json) -> int:
    """Return the HTTP status of an answer; one that tells none and is no error is whole."""
    response = line.get("response") or {}
    return int(response.get("status_code", 500 if line.get("error") else 200))
