"""One request of the command line: what is wished for, and what becomes of it with a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cli.refusals import SAMPLED
from coordinator.cli.report import require_writable
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.cluster.tokenizer import Tokenizer
from coordinator.decoding.decode import Decode
from coordinator.resident.ask import Ask, Conversation, require_utf8
from coordinator.resident.frontend import Frontend, Task
from coordinator.sessions.answer import Answer
from coordinator.sessions.request import room_for_answer
from coordinator.sessions.text import TextStream, TokenIds
from protos.brigade_pb2 import Cache
from worker.errors import InputError


@dataclass(frozen=True)
class Wish:
    """What `generate` is asked for, beyond the cluster: the prompt as text or as token ids, and how to go on."""

    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    system: str | None = None
    raw: bool = False
    max_tokens: int = 256
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what was chosen; the model's own choices are below it
    decode: Decode = field(default_factory=lambda: Decode("auto"))
    cache: Cache = field(default_factory=Cache)
    repeat_guard: int = 0
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    chunk: int | None = None
    as_json: bool = False
    with_stats: bool = False
    trace: Path | None = None
    journal: Path | None = None
    given: frozenset[str] = frozenset()  # flags of the command line, to be compared with a journal's request

    @property
    def is_traced(self) -> bool:
        """Whether anybody wants to know where each millisecond went."""
        return self.as_json or self.with_stats or self.trace is not None


async def prepare(wish: Wish, options: ClusterOptions) -> Task:
    """Read the model's configuration and check the wish against it, before any node is asked.

    Raises:
        InputError: the model cannot serve it. ModelError: there is no such model, or it cannot be read.
    """
    if wish.trace is not None:
        require_writable("trace", wish.trace)
    needs_text = wish.prompt is not None or bool(wish.stops)
    frontend = await Frontend.read(options.model, trust_remote_code=options.trust_remote_code, needs_text=needs_text)
    try:
        task = await frontend.prepare(_ask(wish, frontend))
    except InputError as error:
        if error.field == "prompt" and wish.prompt_tokens is not None:
            raise InputError("prompt_tokens", error.message) from error
        raise
    _refuse_unused(wish, task)
    if wish.prompt is not None and not frontend.has_chat_template and not wish.raw:
        say("note: this model has no chat template; the prompt is given as it stands")
    return task


def how_it_ended(task: Task, answer: Answer, stream: TextStream | TokenIds) -> str:
    """Why there are no more tokens."""
    if answer.finish_reason == "length":
        if room_for_answer(task.request, task.spec.context) < task.request.max_tokens:
            return f"cut off where the model's context of {task.spec.context} tokens ends"
        return f"cut off at --max-tokens {task.request.max_tokens}"
    if stream.is_stopped:
        return "ended at a --stop text"
    return "ended by itself" if answer.tokens[-1] in task.request.eos else "ended as it began to repeat itself"


def how_it_was_drawn(task: Task) -> str:
    """Temperature and seed of a sampled answer, and whose choice that was; empty for the likeliest tokens."""
    sampling = task.request.sampling
    if not sampling.temperature:
        return ""
    own = ", ".join(f"{name} {value:g}" for name, value in task.defaults.items())
    choice = f"as the model's generation_config.json says ({own})" if own else f"at --temp {sampling.temperature:g}"
    return f"sampled {choice}, --seed {sampling.seed}"


def _ask(wish: Wish, frontend: Frontend) -> Ask:
    return Ask(
        prompt=prompt_of(wish, frontend.tokenizer),
        max_tokens=wish.max_tokens,
        sampling=wish.sampling,
        decode=wish.decode,
        cache=wish.cache,
        stops=wish.stops,
        ignore_eos=wish.ignore_eos,
        repeat_guard=wish.repeat_guard,
    )


def prompt_of(wish: Wish, tokenizer: Tokenizer | None) -> Conversation | str | tuple[int, ...]:
    """What the model is given: as a conversation where it has a template for one, and the user does not say `--raw`."""
    if wish.prompt_tokens is not None:
        return wish.prompt_tokens
    assert tokenizer is not None and wish.prompt is not None
    require_utf8("prompt", wish.prompt)
    require_utf8("system_prompt", wish.system or "")
    if not (wish.prompt if wish.raw else wish.prompt.strip()):
        raise InputError("prompt", "expected some text, found none")
    if wish.raw or not tokenizer.has_chat_template:
        if wish.system:
            raise InputError("system_prompt", "this model has no chat template that would give it its place")
        return wish.prompt
    messages = [{"role": "system", "content": wish.system}] if wish.system else []
    return Conversation((*messages, {"role": "user", "content": wish.prompt}))


def _refuse_unused(wish: Wish, task: Task) -> None:
    if not task.request.sampling.temperature:
        for name in SAMPLED:
            if name in wish.sampling:
                raise InputError(
                    name, f"changes nothing at temperature 0, {task.spec.name}'s default; give --temp as well"
                )
