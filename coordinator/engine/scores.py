"""Scores: the logprobs of given texts. Prompts are fed, and one token is generated and dropped."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, collect
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Scored
from coordinator.sessions.request import RequestSpec, most_prompt
from worker.memory.history import common_prefix

ScoredPrompt = str | tuple[int, ...]

# Scores are of the model's own distribution, whatever generation_config.json would have sampled from.
_PLAIN = {"temperature": 0.0, "repetition_penalty": 0.0, "logprobs": 1}
_AT_ONCE = 4  # windows of one text: enough for every stage of a chain to work


@dataclass(frozen=True)
class TextWindow:
    """Tokens [begin, end) of a text are fed, and those from `scored` on are scored within this window."""

    begin: int
    scored: int
    end: int


def windows_of(num_tokens: int, size: int) -> list[TextWindow]:
    """Windows of at most `size` tokens, each beginning in the middle of the one before; each token is scored once."""
    windows = [TextWindow(0, 1, min(size, num_tokens))]
    while (end := windows[-1].end) < num_tokens:
        begin = end - (size + 1) // 2
        windows.append(TextWindow(begin, end, min(begin + size, num_tokens)))
    return windows


def scoring(prompt: ScoredPrompt, score_from: int) -> RequestSpec:
    """Return a request for the scores of a prompt's tokens from index `score_from` on."""
    return RequestSpec(prompt, 1, _PLAIN, Decode("ar"), ignore_eos=True, score_from=score_from)


async def score_text(
    engine: Engine, tokens: Sequence[int], size: int, report: Callable[[int], None] = lambda count: None
) -> list[Scored]:
    """The scores of all tokens of a text but its first, which follows nothing.

    Args:
        size: tokens of a window, in which a longer text is scored; at least 2.
        report: takes how many more were scored.
    Raises:
        InputError: fewer than two tokens, or some that the model does not know.
    """
    windows = windows_of(len(tokens), size)
    requests = [
        await engine.prepare(scoring(tuple(tokens[window.begin : window.end]), window.scored - window.begin))
        for window in windows
    ]
    answers: list[list[Scored]] = [[] for _ in requests]
    async with aclosing(engine.generate_all(requests, at_once=_AT_ONCE)) as outputs:
        async for number, output in outputs:
            answers[number] += output.scores
            report(len(output.scores))
    return [score for answer in answers for score in answer]


async def score_continuations(
    engine: Engine, prompt: ScoredPrompt, continuations: Sequence[ScoredPrompt]
) -> list[list[Scored]]:
    """Return the scores of each continuation's tokens after the prompt, which is fed once.

    A text is tokenized together with a prompt that is a text. If that changes the prompt's last token, scoring begins
    there.

    Raises:
        InputError: the prompt has no token, or a continuation has none.
    """
    with engine.use.using():  # an idle model would be unloaded while many texts are tokenized
        specs = await continuation_specs(engine.inputs, prompt, continuations)
        answers = await collect(engine, [await engine.prepare(spec) for spec in specs])
    return [[score for output in answer for score in output.scores] for answer in answers]


async def continuation_specs(
    inputs: InputProcessor, prompt: ScoredPrompt, continuations: Sequence[ScoredPrompt]
) -> list[RequestSpec]:
    """Return the requests of `score_continuations`. Raises InputError for a text that is too long or unsuitable."""
    most = most_prompt(inputs.spec, 1)
    begin, specs = await inputs.prompt_ids(prompt, most=most), []
    for continuation in continuations:
        if isinstance(prompt, str) and isinstance(continuation, str):
            whole = await inputs.prompt_ids(prompt + continuation, most=most)
        else:
            whole = begin + await inputs.prompt_ids(continuation, most=most, special=False)
        specs.append(scoring(whole, max(1, common_prefix(begin, whole)) if begin else 0))
    return specs
