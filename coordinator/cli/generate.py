"""`brigade generate`: one request, its text as it comes, and what it took."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from coordinator.cli.continuing import header_of, recall, resume
from coordinator.cli.report import logprobs_of, print_stats, print_summary, stages_of, stats_of
from coordinator.cli.trace import trace_events
from coordinator.cli.wish import Wish, how_it_ended, how_it_was_drawn, prepare
from coordinator.cluster.chain import Chain
from coordinator.cluster.journal_file import JournalFile
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.cluster.runner import Emit, Keep, keep_nothing
from coordinator.resident.frontend import Frontend, Task
from coordinator.resident.model import open_resident
from coordinator.sessions.answer import Answer, Piece, Token
from coordinator.sessions.request import most_rows
from coordinator.sessions.text import TextStream, TokenIds
from worker.errors import BrigadeError, InputError

_MAX_WAIT_S = 600.0  # for memory


class Printer:
    """Prints an answer's pieces as they come. Use as a context manager: it never leaves a line open.

    Whoever interrupts the answer is told what there was of it.
    """

    def __init__(self, stream: TextStream | TokenIds, *, is_silent: bool = False) -> None:
        self._stream = stream
        self._is_silent = is_silent
        self._began = self._first_at = self._last_at = time.monotonic()
        self._last = "\n"
        self._num_before = stream.num_tokens  # by a journal

    def __enter__(self) -> Self:
        self._began = self._first_at = self._last_at = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, OSError):  # or its reader left
            self._end_line(is_done=kind is None)
        if kind is asyncio.CancelledError and self._stream.num_tokens > self._num_before:
            say(self._figures())

    def __call__(self, text: str) -> None:
        """Take a piece of text, as it becomes final."""
        self._last_at = time.monotonic()
        if self._first_at == self._began:
            self._first_at = self._last_at
        if text and not self._is_silent:
            self._last = text
            sys.stdout.write(text)
            sys.stdout.flush()

    def _end_line(self, *, is_done: bool) -> None:
        """A whole answer ends with a line end of its own, one that broke off only if its line is open."""
        if not self._is_silent and (is_done or not self._last.endswith("\n")):
            print(flush=True)

    def _figures(self) -> str:
        num_tokens, took_s = self._stream.num_tokens - self._num_before, self._last_at - self._first_at
        speed = f", {(num_tokens - 1) / took_s:.1f} tok/s" if took_s else ""
        return f"interrupted after {num_tokens} tokens{speed}; first after {self._first_at - self._began:.3f} s"


class Gathered:
    """What became known so far, and was kept by `keep`."""

    def __init__(self, known: Sequence[Token], keep: Keep) -> None:
        self.tokens = list(known)
        self._keep = keep

    async def __call__(self, piece: Piece, emit: Emit) -> None:
        await self._keep(piece, emit)
        self.tokens += piece.tokens


async def run_generate(options: ClusterOptions, wish: Wish) -> None:
    """One request: text to standard output as it comes, the summary to standard error."""
    if wish.journal is None:
        await _answer(options, wish, await prepare(wish, options))
        return
    async with JournalFile(wish.journal) as journal:
        if journal.found is not None:
            await _answer(options, wish, await resume(wish, options, journal.found), journal.keep)
        elif wish.prompt is None and wish.prompt_tokens is None:
            raise InputError(
                "journal", "it ends before its request does, so there is none to go on with; give a prompt"
            )
        else:
            task = await prepare(wish, options)
            await journal.begin(await header_of(task))
            await _answer(options, wish, task, journal.keep)


async def _answer(options: ClusterOptions, wish: Wish, task: Task, keep: Keep = keep_nothing) -> None:
    stream, known = task.stream(), task.request.known
    recall(known, task.request, stream)
    if known.finish_reason is not None:
        _tell_finished(wish, task, stream)
        return
    context = max(options.context, most_rows(task.request, task.spec.context))
    frontend = Frontend(task.checkpoint, task.spec, task.tokenizer)
    async with open_resident(frontend, options, context, max_waiting=1, max_wait_s=_MAX_WAIT_S) as model:
        tokens = Gathered(known.tokens, keep)
        with Printer(stream, is_silent=wish.as_json) as emit, _failures_as_json(wish, task, stream, tokens):
            answer = await model.runner.answer(
                task.request, text=stream, emit=emit, keep=tokens, chunk=wish.chunk, traced=wish.is_traced
            )
            answer.statuses = await model.runner.chain.statuses()  # while the caches are still there
        chain = model.runner.chain  # on which the answer ended
        if wish.trace is not None:
            wish.trace.write_text(json.dumps(trace_events(answer.usage.legs, answer.token_times)), encoding="utf-8")
        if wish.as_json:
            print(json.dumps(_as_json(task, chain, answer, stream)), flush=True)
            return
        print_summary(answer, how_it_ended(task, answer, stream), how_it_was_drawn(task))
        if wish.with_stats:
            print_stats(answer, chain.plan, answer.waterfall())


@contextmanager
def _failures_as_json(wish: Wish, task: Task, stream: TextStream | TokenIds, gathered: "Gathered") -> Iterator[None]:
    """With `--json`, print what there is of an answer that breaks off, and why it does."""
    try:
        yield
    except BrigadeError as error:
        if wish.as_json:
            known = _answer_as_json(task, gathered.tokens, None, stream)
            figures: dict[str, Any] = {"stats": None, "stages": [], "waterfall": None}
            print(json.dumps({**known, **figures, "error": {"message": str(error)}}), flush=True)
        raise


def _tell_finished(wish: Wish, task: Task, stream: TextStream | TokenIds) -> None:
    """Of an answer that its journal holds whole; no node was asked."""
    known = task.request.known
    if wish.as_json:
        figures: dict[str, Any] = {
            "stats": {"tokens_from_journal": len(known.tokens), "recoveries": 0},
            "stages": [],
            "waterfall": None,
        }
        print(json.dumps(_answer_as_json(task, known.tokens, known.finish_reason, stream) | figures), flush=True)
    else:
        say(f"{wish.journal} holds the whole answer already: {len(known.tokens)} tokens; --json prints it")


def _as_json(task: Task, chain: Chain, answer: Answer, stream: TextStream | TokenIds) -> dict[str, Any]:
    """The object of `--json`."""
    waterfall = answer.waterfall()
    known = task.request.known.tokens
    return {
        **_answer_as_json(task, [*known, *answer.samples], answer.finish_reason, stream),
        "stats": stats_of(answer) | ({"tokens_from_journal": len(known)} if known else {}),
        "stages": stages_of(answer, chain.plan, waterfall),
        "waterfall": {"wall_ms": waterfall.wall_ms, **waterfall.parts},
    }


def _answer_as_json(
    task: Task, tokens: Sequence[Token], finish_reason: str | None, stream: TextStream | TokenIds
) -> dict[str, Any]:
    """What it is, whatever it took."""
    sampling = task.request.sampling
    return {
        "text": stream.text,
        "tokens": [token.token for token in tokens],
        "prompt_tokens": len(task.request.prompt),
        "finish_reason": finish_reason,
        "logprobs": logprobs_of(tokens) if sampling.logprobs else None,
        "seed": sampling.seed,
    }
