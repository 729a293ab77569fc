"""`brigade eval`: the accuracy of the user's own model, cluster and decoders on the user's own questions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.batch import MAX_WAIT_S, Answers, open_answers
from coordinator.cli.flags import given_flags
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say, show_tokens, telling_interrupts
from coordinator.cluster.tables import fitting, plain_console
from coordinator.decoding.decode_options import DECODE_FIELDS, takes
from coordinator.engine.bounded import TEMPLATES, Texts
from coordinator.quality.accuracy import AccuracyRow, EvalAnswer, accuracy_row, eval_answer
from coordinator.quality.questions import BUILT_IN, CHECKS, Question, read_questions
from coordinator.sessions.output import Output, Usage
from coordinator.sessions.request import Conversation, RequestSpec
from worker.errors import InputError
from worker.platform.files import writing
from worker.platform.tasks import for_each
from worker.platform.text import Json
from worker.platform.threads import run_in_thread

_HEADS = ("questions", "decoder", "right", "of", "accuracy", "95 %", "as ar", "tokens/step", "rows/token", "ms/token")

Ask = Callable[["EvalCase"], AsyncGenerator[Output, None]]


@dataclass(frozen=True)
class QuestionFlags:
    """Questions, and how they are put to the model."""

    questions: Annotated[
        list[str],
        typer.Option(
            metavar="FILE|SET",
            help="JSON lines with a prompt (or question) and an answer; a task file of lm-eval (.yaml); or a built-in "
            f"set: {', '.join(BUILT_IN)}. Repeatable.",
        ),
    ]
    check: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(CHECKS),
            help="How answers are judged if a line has no check of its own: the last number (of GSM8K's answers that "
            "after ####), the same text, a regular expression that is found, a text within, the letter of a choice.",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Ask this many questions of each file only.")] = None
    system_prompt: Annotated[str | None, typer.Option(help="A system message before each prompt.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without the chat template.")] = False

    def read(self, texts: Texts) -> dict[str, tuple[Question, ...]]:
        """Return the questions by their source. Raises InputError for wrong flags and files."""
        if self.check is not None and self.check not in CHECKS:
            raise InputError("check", f"expected {', '.join(CHECKS)}, got {self.check!r}")
        if self.raw and self.system_prompt:
            raise InputError("system_prompt", "not expected with --raw, which has no messages")
        sources = dict.fromkeys(self.questions)
        return {source: read_questions(source, self.check, self.limit, texts) for source in sources}

    def cases(self, name: str, questions: Sequence[Question], decoder: str, spec: RequestSpec) -> list[EvalCase]:
        """Return the questions of the set of this name for one decoder; `spec` has no prompt."""
        return [
            EvalCase(name, each, decoder, replace(spec, stops=each.stops), self.system_prompt, self.raw)
            for each in questions
        ]


def eval(
    ctx: typer.Context,
    *,
    questions: QuestionFlags,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="ANSWERS.jsonl", help="Append answers to this file, and ask none that it has."
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=128, help="Questions at once.")] = 8,
    max_tokens: flags.MaxTokens = 512,
    decode: Annotated[
        str,
        typer.Option(metavar="KIND,KIND", help="Decoders to compare, as of `generate`; with ar, as in ar,diffusion."),
    ] = "auto",
    windows: Annotated[flags.DecodeFlags, TakeFlags(*DECODE_FIELDS)],
    server: flags.ServerFlags,
    cluster: flags.ClusterFlags,
    sampling: flags.SamplingFlags,
    plot: Annotated[Path | None, typer.Option(help="Draw the accuracies to this image file.")] = None,
    as_json: flags.JsonFlag = False,
) -> Coroutine[Any, Any, None]:
    """Ask questions, many at once, and print how many answers are right, with what decoding them took.

    Decoding is greedy without --temp, the seed 0 without --seed, and one decoder works at a time.
    The interval is Wilson's of 95 %. `as ar` is the share of answers with the text that `ar` gives. Rows leave out the
    prompt, times have it. Run again with the same --output, the command continues where it stopped.

    brigade eval --questions facts --questions arithmetic --decode ar,diffusion-fast --local 2

    brigade eval --questions gsm8k.jsonl --check last-number -o answers.jsonl --server http://localhost:9338
    """
    server.refuse_others(ctx)
    if plot is not None:
        from coordinator.bench.report import check_plot

        check_plot(plot)
    kinds = tuple(dict.fromkeys(kind.strip() for kind in decode.split(",")))
    flags.refuse_drafter(ctx, kinds)
    given = {name: ctx.params[name] for name in DECODE_FIELDS if name in given_flags(ctx)}
    # each decoder takes what is for it; one that none takes is refused
    others = {name for name in given if not any(takes(kind, name) for kind in kinds)}
    fields = {
        kind: {name: value for name, value in given.items() if takes(kind, name) or name in others} for kind in kinds
    }
    decoders = {kind: flags.DecodeFlags(decode=kind, **fields[kind]).decoder() for kind in kinds}
    texts = Texts()
    sets = questions.read(texts)
    chosen = {"temperature": 0.0, "seed": 0} | sampling.chosen()  # of any model: a run can be continued
    spec = RequestSpec((), max_tokens, chosen, **sampling.tokens())
    cases = [
        case
        for kind in kinds
        for name, of_set in sets.items()
        for case in questions.cases(name, of_set, kind, replace(spec, decode=decoders[kind]))
    ]
    model_at: AbstractAsyncContextManager[EvalModel]
    if server.server is None:
        TEMPLATES.start()  # in parallel to imports that take a second
        model_at = loaded(cluster.options(), cases, concurrency)
    else:
        bodies = {kind: windows.in_numbers(of_kind) for kind, of_kind in fields.items()}
        model_at = _served(server, {"max_tokens": max_tokens, **chosen, **sampling.tokens()}, bodies)
    return run_eval(model_at, EvalRun(cases, texts), output, concurrency, plot=plot, as_json=as_json)


@dataclass(frozen=True)
class EvalCase:
    """A question for one decoder."""

    set_name: str
    question: Question
    decoder: str
    spec: RequestSpec  # without its prompt
    system: str | None
    raw: bool

    def prompt(self, *, has_template: bool = True) -> Conversation | str:
        is_raw = self.raw or not has_template or bool(self.question.continuations)
        return self.question.prompt if is_raw else Conversation.of(self.question.prompt, self.system)

    def key(self, model: EvalModel) -> str:
        """Return what tells this answer from others in a file: all that the answer depends on."""
        spec, prompt = self.spec, (self.question.prompt, self.question.continuations, self.question.lengths)
        about: list[Any] = [model.name, prompt, self.system, self.raw, spec.max_tokens]
        about += [dict(spec.sampling), repr(spec.decode), spec.stops, spec.stop_token_ids, spec.dry_sequence_breakers]
        about += model.files
        return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class EvalModel:
    """A model that answers."""

    name: str
    ask: Ask
    files: Sequence[Any] = ()  # what tells its files from others of that name; those of a server are unknown


@asynccontextmanager
async def loaded(options: ClusterOptions, cases: Sequence[EvalCase], concurrency: int) -> AsyncIterator[EvalModel]:
    """Load a model over a cluster.

    Raises:
        InputError: the model cannot serve one of the cases. BrigadeError: it cannot be loaded.
    """
    from coordinator.engine.engine import open_engine
    from coordinator.engine.inputs import InputProcessor
    from coordinator.engine.scores import continuation_specs, score_continuations
    from coordinator.sessions.request import most_rows
    from worker.model.contents import contents_of

    inputs = await InputProcessor.read(options)
    has_template = inputs.has_chat_template
    longest = 0
    for case in cases:  # errors are raised before anything is loaded
        question = case.question
        with question.named_in_errors():
            specs = [replace(case.spec, prompt=case.prompt(has_template=has_template))]
            if question.continuations:
                specs = await continuation_specs(inputs, question.prompt, question.continuations)
            for spec in specs:
                longest = max(longest, most_rows(await inputs.make_request(spec), inputs.spec.context))
    options = replace(options, context=max(options.context, longest))
    async with open_engine(inputs, options, max_waiting=concurrency, max_wait_s=MAX_WAIT_S) as engine:

        async def score(prompt: str, continuations: Sequence[str]) -> list[float]:
            scores = await score_continuations(engine, prompt, continuations)
            return [math.fsum(each.token.logprob for each in continuation) for continuation in scores]

        async def ask(case: EvalCase) -> AsyncGenerator[Output, None]:
            if case.question.continuations:
                yield await _chosen(case.question, score)
                return
            spec = replace(case.spec, prompt=case.prompt(has_template=has_template))
            async with aclosing(engine.generate(await engine.prepare(spec))) as outputs:
                async for output in outputs:
                    yield output

        model = inputs.checkpoint
        files: list[Any] = []
        for each in filter(None, (model, model.drafter)):
            weights = sorted(each.hub_hashes.items()) or (await run_in_thread(partial(contents_of, each))).marks.hex()
            files += each.description, each.fingerprint.tokenizer, weights
        yield EvalModel(model.name, ask, files)


@asynccontextmanager
async def _served(given: flags.ServerFlags, body: Json, fields: Mapping[str, Json]) -> AsyncIterator[EvalModel]:
    """Connect to a server. `fields` are those of each decoder."""
    from coordinator.cli.remote import open_server

    async with open_server(given) as server:

        async def ask(case: EvalCase) -> AsyncGenerator[Output, None]:
            if case.question.continuations:
                yield await _chosen(case.question, server.score)
                return
            stop = {"stop": list(case.question.stops)} if case.question.stops else {}
            asked = {**body, **fields[case.decoder], **stop, "decode": case.decoder}
            async with aclosing(server.generate(case.prompt(), asked)) as outputs:
                async for output in outputs:
                    yield output

        yield EvalModel(server.name, ask)


async def _chosen(question: Question, score: Callable[[str, Sequence[str]], Awaitable[list[float]]]) -> Output:
    """Return the output that answers a question by its likeliest choice; `score` returns their log-probabilities."""
    began = time.monotonic_ns()
    best = str(question.best(await score(question.prompt, question.continuations)))
    return Output(best, (), time.monotonic_ns(), "stop", Usage(started=began), content=best)


class EvalRun:
    """Questions for decoders, and which of the answers so far are right."""

    def __init__(self, cases: Sequence[EvalCase], texts: Texts) -> None:
        self.cases = cases
        self._texts = texts
        self._right: dict[int, bool] = {}  # by the id of a case

    async def answer_all(
        self, model: EvalModel, known: dict[str, EvalAnswer], file: Answers[EvalAnswer] | None, concurrency: int
    ) -> None:
        """Answer every case that has no answer in `known`, which takes the others, as the file does."""
        keys = [case.key(model) for case in self.cases]
        left = {key: case for key, case in zip(keys, self.cases, strict=True) if key not in known}
        if num_known := len(set(keys)) - len(left):
            say(f"{num_known} of {len(set(keys))} answers are known")
        with show_tokens("answered", len(set(keys)), done=num_known) as report:

            async def answer(key: str) -> None:
                case = left[key]
                with case.question.named_in_errors():
                    known[key] = found = await read_answer(partial(model.ask, case))
                is_right = await run_in_thread(partial(self._is_right, case, found))
                about = {"model": model.name, "question": case.question.place, "decoder": case.decoder}
                if file is not None:
                    judged = {"expected": case.question.expected, "right": is_right}
                    file.add({"key": key, **about, **judged, **asdict(found)})
                report(1, found.tokens)

            for kind in dict.fromkeys(case.decoder for case in self.cases):  # each has the nodes for itself
                waiting = [key for key, case in left.items() if case.decoder == kind]
                await for_each(waiting, answer, most=concurrency)

    def rows(self, model: EvalModel, known: Mapping[str, EvalAnswer]) -> list[AccuracyRow]:
        """Judge the answers: a row per set and decoder."""
        cases: dict[str, dict[str, list[EvalCase]]] = {}
        for case in self.cases:
            cases.setdefault(case.set_name, {}).setdefault(case.decoder, []).append(case)
        rows = []
        for name, by_kind in cases.items():
            answers = {kind: [known[case.key(model)] for case in of_kind] for kind, of_kind in by_kind.items()}
            for kind, of_kind in by_kind.items():
                right = list(map(self._is_right, of_kind, answers[kind]))
                rows.append(accuracy_row(name, kind, answers[kind], right, answers.get("ar")))
        return rows

    def _is_right(self, case: EvalCase, answer: EvalAnswer) -> bool:
        """Return whether an answer is right. It may take seconds, but only once."""
        if id(case) not in self._right:
            try:
                self._right[id(case)] = case.question.is_right(answer.text, self._texts)
            except InputError as error:
                say(f"{case.question.place}: {error.message}; its answer counts as wrong")
                self._right[id(case)] = False
        return self._right[id(case)]


async def read_answer(ask: Callable[[], AsyncGenerator[Output, None]]) -> EvalAnswer:
    """Ask, again and again while a server has no room."""
    from coordinator.cli.remote import ServerBusy

    while True:
        try:
            async with aclosing(ask()) as outputs:
                return eval_answer([output async for output in outputs])
        except ServerBusy as error:
            await asyncio.sleep(error.retry_s)


async def run_eval(
    model_at: AbstractAsyncContextManager[EvalModel],
    run: EvalRun,
    output: Path | None,
    concurrency: int,
    *,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Answer what has no answer yet, then print the table or the JSON object, and draw the picture."""
    with ExitStack() as stack:
        known: dict[str, EvalAnswer] = {}
        file: Answers[EvalAnswer] | None = None
        if output is not None:
            file = stack.enter_context(open_answers(output, _known, b'{"key": "'))
            known = dict(file.known)
            line = f"interrupted: the same command continues with the answers that {output} lacks"
            stack.enter_context(telling_interrupts(line))
        async with model_at as model:
            await run.answer_all(model, known, file, concurrency)
    rows = await run_in_thread(partial(run.rows, model, known))
    if as_json:
        flags.print_json({"model": model.name, "rows": [row.as_json() for row in rows]})
    else:
        console = plain_console()
        console.print(fitting(_HEADS, list(map(_cells, rows)), console.width, num_keys=2))
    if plot is not None:
        _write_plot(model.name, rows, plot)


def _known(line: Json) -> tuple[str, EvalAnswer]:
    """Return the key and the answer of a line. Raises LookupError or TypeError."""
    found = EvalAnswer(**{name: line[name] for name in EvalAnswer.__annotations__})
    numbers = found.tokens, found.steps, found.rows, found.ms
    if not isinstance(found.text, str) or not all(type(each) in (int, float) for each in numbers):
        raise TypeError(line)
    return str(line["key"]), found


def _cells(row: AccuracyRow) -> list[str]:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else f"{value:{form}}"

    low, high = row.interval
    share = f"{row.num_right / row.num:.1%}", f"{low:.1%} to {high:.1%}", text(row.equal_to_ar, ".1%")
    costs = text(row.tokens_per_step, ".2f"), text(row.rows_per_token, ".2f"), text(row.ms_per_token, ".1f")
    return [row.questions, row.decoder, str(row.num_right), str(row.num), *share, *costs]


def _write_plot(model: str, rows: Sequence[AccuracyRow], path: Path) -> None:
    """Draw a bar per row, with its interval. Raises InputError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes, names = figure.subplots(), [f"{row.questions}, {row.decoder}" for row in rows]
    shares = [row.num_right / row.num for row in rows]
    bounds = [row.interval for row in rows]
    errors = [[share - low for share, (low, _) in zip(shares, bounds, strict=True)],
              [high - share for share, (_, high) in zip(shares, bounds, strict=True)]]  # fmt: skip
    axes.barh(range(len(rows)), shares, xerr=errors, capsize=3, color="#6a9fd8")
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"share of right answers of {model}, with its interval of 95 %")
    with writing("plot", path):
        figure.savefig(path, dpi=120)
