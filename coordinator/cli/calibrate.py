"""`brigade calibrate`: thresholds of `diffusion-fast` for the user's own model and tasks."""

import json
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.cli import flags
from coordinator.cli.eval import Ask, EvalCase, QuestionFlags, loaded
from coordinator.cli.run import TakeFlags
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import TokenReport, say, show_tokens
from coordinator.cluster.tables import fitting, plain_console
from coordinator.decoding.decode_options import Decode
from coordinator.engine.bounded import TEMPLATES, Texts
from coordinator.quality.calibrate import Calibration, Guess, TaughtFill, find_thresholds
from coordinator.quality.questions import Question
from coordinator.sessions.output import Answer
from coordinator.sessions.request import RequestSpec
from worker.errors import InputError
from worker.platform.files import require_writable, writing
from worker.platform.tasks import for_each
from worker.platform.threads import run_in_thread

_HEADS = ("kind", "guesses", "threshold", "penalty", "kept", "agreement", "95 %")


def calibrate(
    ctx: typer.Context,
    *,
    questions: Annotated[QuestionFlags, TakeFlags("questions", "limit", "system_prompt", "raw")],
    agreement: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Least share of the kept guesses that are the tokens of `ar`.")
    ] = 0.99,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the thresholds.")
    ] = Path("thresholds.json"),
    concurrency: Annotated[int, typer.Option(min=1, max=128, help="Questions at once.")] = 8,
    max_tokens: flags.MaxTokens = 512,
    cluster: flags.ClusterFlags,
    sampling: flags.SamplingFlags,
    as_json: flags.JsonFlag = False,
) -> Coroutine[Any, Any, int]:
    """Find thresholds for --decode diffusion-fast at which so many of its tokens are those of `ar`.

    Each question is answered twice: by `diffusion`, whose tokens are those of `ar`, then by the windows of
    `diffusion-fast` upon that answer, where every guess is logged with its entropy, its distance, and whether it holds.
    Half of a file's questions choose its threshold, the others check it: the lower bound of 95 % of their agreement
    must reach --agreement. The best guess of a step counts at every threshold: it is kept in any case. A file is one
    kind of task, named like the file without its ending. Exit code 1 and no file if no kind reaches it.

    brigade calibrate --questions facts --questions code --agreement 0.99 --local 2

    brigade generate --decode diffusion-fast --entropy-threshold thresholds.json:code "Write a function add(a, b)."
    """
    flags.refuse_drafter(ctx, ("diffusion",))
    for source in questions.questions:
        flags.require_other_file("output", output, Path(source))
    require_writable("output", output)
    chosen = {"temperature": 0.0, "seed": 0} | sampling.chosen()
    spec = RequestSpec((), max_tokens, chosen, Decode("diffusion"), **sampling.tokens())
    sets = _by_kind(replace(questions, check="contains").read(Texts()))  # no answer is judged, and none needs a check
    cases = {kind: questions.cases(kind, each, "diffusion", spec) for kind, each in sets.items()}
    TEMPLATES.start()  # in parallel to imports that take a second
    return run_calibrate(cluster.options(), cases, agreement, output, concurrency, as_json=as_json)


def _by_kind(sets: Mapping[str, Sequence[Question]]) -> dict[str, Sequence[Question]]:
    """Return the questions of each kind of task. Raises InputError for sets that cannot be told apart or halved."""
    found: dict[str, Sequence[Question]] = {}
    for name, questions in sets.items():
        if len(questions) < 2:
            raise InputError("questions", f"expected at least 2 questions in {name}, found {len(questions)}")
        if any(question.continuations for question in questions):
            expected = "expected questions that are answered by a text"
            raise InputError("questions", f"{expected}, found choices that are scored in {name}")
        kind = Path(name).stem
        if ":" in kind or kind in found:
            expected = "expected a file name of its own without ':', as it names the kind of task"
            raise InputError("questions", f"{expected}, found {name}; rename the file")
        found[kind] = questions
    return found


async def run_calibrate(
    options: ClusterOptions,
    cases: Mapping[str, Sequence[EvalCase]],
    agreement: float,
    output: Path,
    concurrency: int,
    *,
    as_json: bool,
) -> int:
    """Answer, print a row per kind of task, and write the file. Return the exit code: 1 if no kind reaches it."""
    asked = [case for of_set in cases.values() for case in of_set]
    found: dict[str, Calibration | None] = {}
    num_guesses: dict[str, int] = {}
    async with loaded(options, [*asked, *(_taught(case, TaughtFill()) for case in asked)], concurrency) as model:
        with show_tokens("answered", len(asked)) as report:
            guesses = await _answer_all(asked, model.ask, concurrency, report)
    for name, of_set in cases.items():
        fitted, held_out = ([guess for case in of_set[half::2] for guess in guesses[id(case)]] for half in (0, 1))
        num_guesses[name] = len(fitted) + len(held_out)
        found[name] = await run_in_thread(partial(find_thresholds, fitted, held_out, agreement))
    reached = {name: each.as_json() for name, each in found.items() if each}
    if as_json:
        flags.print_json({"model": model.name, "agreement": agreement, "kinds": {**dict.fromkeys(found), **reached}})
    else:
        rows = [_cells(name, num_guesses[name], each) for name, each in found.items()]
        console = plain_console()
        console.print(fitting(_HEADS, rows, console.width))
    if lacking := sorted(found.keys() - reached.keys()):
        say(f"no threshold reaches {agreement:g} for {', '.join(lacking)}; give more questions, or ask for less")
    if not reached:
        return 1
    content = json.dumps({"model": model.name, "agreement": agreement, "kinds": reached}, indent=1)
    with writing("output", output):
        await run_in_thread(partial(output.write_text, f"{content}\n", encoding="utf-8"))
    say(f"{output} has the thresholds: --decode diffusion-fast --entropy-threshold {output}:{next(iter(reached))}")
    return 0


async def _answer_all(
    cases: Sequence[EvalCase], ask: Ask, concurrency: int, report: TokenReport
) -> dict[int, list[Guess]]:
    """Return the guesses of each case, by its id."""
    found: dict[int, list[Guess]] = {}

    async def answer(case: EvalCase) -> Answer:
        answer = Answer()
        async with aclosing(ask(case)) as outputs:
            async for output in outputs:
                answer.add(output)
        return answer

    async def answer_twice(case: EvalCase) -> None:
        by_ar, log = await answer(case), list[Guess]()
        found[id(case)] = log
        if by_ar.tokens:
            first, tokens = by_ar.usage.num_prompt, tuple(by_ar.tokens)
            await answer(_taught(case, TaughtFill(question=case.question.place, first=first, tokens=tokens, log=log)))
        report(1, len(by_ar.tokens))

    await for_each(cases, answer_twice, most=concurrency)
    return found


def _taught(case: EvalCase, taught: TaughtFill) -> EvalCase:
    """Return the case whose answer is known, to be guessed."""
    max_tokens = len(taught.tokens) or case.spec.max_tokens
    return replace(case, spec=replace(case.spec, decode=taught, max_tokens=max_tokens))


def _cells(name: str, num: int, found: Calibration | None) -> list[str]:
    if found is None:
        return [name, str(num), *["-"] * 5]
    kept, (low, high) = found.kept, found.kept.interval
    return [
        *(name, str(num), f"{found.entropy_threshold:.3f}", f"{found.position_penalty:g}"),
        *(f"{kept.num / found.num:.0%}", f"{kept.num_held / kept.num:.2%}", f"{low:.2%} to {high:.2%}"),
    ]
