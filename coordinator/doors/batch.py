"""`brigade batch`: a file of requests, as many at once as fit, each answer a line of another file."""

import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say, telling_interrupts
from coordinator.cluster.together import together
from coordinator.doors.bars import Report, show_tokens
from coordinator.doors.batch_files import Answers, Entry, open_answers, read_batch
from coordinator.http.errors import http_error
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import ResidentModel, open_resident
from coordinator.resident.several import collect
from coordinator.shapes.body import read
from coordinator.shapes.openai_chat import ChatBody
from coordinator.shapes.openai_completions import CompletionBody
from coordinator.shapes.openai_tasks import prepare_chat, prepare_completions
from worker.errors import BrigadeError, InputError

Json = dict[str, Any]
_MOST_AT_ONCE = 128  # requests that are under way or wait for memory
_MAX_WAIT_S = 7 * 86400.0  # for memory: nobody waits for a single answer
_MOST_NAMED = 10
_BAD_INPUT, _FAILED = 2, 3


async def run_batch(options: ClusterOptions, source: Path, target: Path, max_tokens: int) -> int:
    """Answer all requests that `target` has no answer to; the exit code.

    Args:
        max_tokens: of an answer whose request names no number.

    Raises:
        InputError: a file cannot be read or written. BrigadeError: the model cannot be loaded, or its cluster failed
            for good: what was answered until then is in the file.
    """
    _require_two_files(source, target)
    batch = read_batch(source)
    _name(batch.problems)
    code = _BAD_INPUT if batch.problems else 0
    with open_answers(target) as answers:
        entries = [entry for entry in batch.entries if entry.custom_id not in answers.known]
        num_known = len(batch.entries) - len(entries)
        failed = [status for entry in batch.entries if (status := answers.known.get(entry.custom_id, 200)) >= 400]
        if num_known:
            beside = f", {len(failed)} of them with an error" if failed else ""
            say(f"{target} has the answers to {num_known} of {len(batch.entries)} requests{beside}")
        code = max([code, *map(_exit_code, failed)])
        if not entries:
            return code
        frontend = await Frontend.read(
            options.model, trust_remote_code=options.trust_remote_code, max_tokens=max_tokens
        )
        async with open_resident(
            frontend, options, options.context, max_waiting=_MOST_AT_ONCE, max_wait_s=_MAX_WAIT_S
        ) as model:
            with show_tokens("answered", len(batch.entries), done=num_known) as report:
                run = Run(model, answers, report)
                with telling_interrupts(partial(run.interrupted, target)):
                    await run.answer_all(entries)
    say(run.summary(target))
    return max([code, *run.codes])


def _exit_code(status: int) -> int:
    """Of a request that was answered with this status, as an error."""
    return _BAD_INPUT if status == 400 else _FAILED


def _require_two_files(source: Path, target: Path) -> None:
    if target.exists() and source.exists() and target.samefile(source):
        raise InputError("output", "expected another file than that of the requests")


def _name(problems: Sequence[str]) -> None:
    for problem in problems[:_MOST_NAMED]:
        say(problem)
    if len(problems) > _MOST_NAMED:
        say(f"and {len(problems) - _MOST_NAMED} lines more")


@dataclass
class Run:
    """What one run makes of its requests."""

    model: ResidentModel
    answers: Answers
    report: Report
    codes: Counter[int] = field(default_factory=Counter)  # exit codes of what failed
    num_answered: int = 0
    num_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    async def answer_all(self, entries: list[Entry]) -> None:
        """Begin with the first; whenever one has ended another one begins."""
        left = iter(entries)
        await together(*(self._answer_in_turn(left) for _ in entries[:_MOST_AT_ONCE]))

    async def _answer_in_turn(self, left: Iterator[Entry]) -> None:
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
        """Raise what ended all requests: none of them is to blame, and another run may answer them."""
        failure = self.model.runner.failure
        if failure is not None:
            raise failure.again() if isinstance(failure, BrigadeError) else failure

    async def _answer(self, entry: Entry) -> Json:
        if entry.method != "POST" or entry.url not in ROUTES:
            found = f"{entry.method} {entry.url}"
            raise InputError("url", f"expected POST to {' or '.join(ROUTES)}, found {found}")
        return await ROUTES[entry.url](self.model, entry.body)

    def interrupted(self, target: Path) -> str:
        """What is said where it does not come to its end."""
        return f"interrupted: {self.summary(target)}; the same command goes on with the others"

    def summary(self, target: Path) -> str:
        took_s = time.monotonic() - self.began
        failed = f", {sum(self.codes.values())} of them with an error" if self.codes else ""
        speed = f"{self.num_tokens} tokens in {took_s:.1f} s, {self.num_tokens / took_s:.1f} tok/s"
        return f"{self.num_answered} requests answered{failed} in {target}: {speed}"


async def _chat(model: ResidentModel, given: Json) -> Json:
    body = read(ChatBody, given)
    tasks, answer = await prepare_chat(model, model.name, body)
    return answer.whole(await collect(model, tasks))


async def _completions(model: ResidentModel, given: Json) -> Json:
    body = read(CompletionBody, given)
    tasks, answer = await prepare_completions(model, model.name, body)
    return answer.whole(await collect(model, tasks))


ROUTES: dict[str, Callable[[ResidentModel, Json], Awaitable[Json]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
}


def _told(entry: Entry, status: int, body: Json) -> Json:
    """The line of an answer, as OpenAI's batch files have it."""
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": entry.custom_id, "response": response, "error": None}


def _failed(entry: Entry, error: BrigadeError) -> Json:
    """The line of a request that cannot be answered: both as a response and as an error."""
    found = http_error(error)
    said = {"code": found.code, "message": f"line {entry.number}: {found.message}"}
    return _told(entry, found.status, found.to_openai()) | {"error": said}
