"""What OpenAI's requests are for a model: the tasks of all choices, and how their answers are told."""

import time
import uuid

from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from coordinator.resident.several import prepare_choices
from coordinator.sessions.text import TokenIds
from coordinator.shapes.openai_chat import ChatAnswer, ChatBody
from coordinator.shapes.openai_completions import Choice, CompletionAnswer, CompletionBody, RawPrompt


async def prepare_chat(model: ResidentModel, name: str, body: ChatBody) -> tuple[list[Task], ChatAnswer]:
    """A conversation's tasks, whose answers are told by a model of this name."""
    tasks, frontend = await prepare_choices(model, body.ask(), body.n), model.frontend
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    return tasks, ChatAnswer(
        answer_id, name, int(time.time()), frontend.token_text, body.logprobs, frontend.token_bytes
    )


async def prepare_completions(
    model: ResidentModel, name: str, body: CompletionBody
) -> tuple[list[Task], CompletionAnswer]:
    """The tasks of all choices, and how their answers are told by a model of this name."""
    tasks: list[Task] = []
    choices: list[Choice] = []
    for prompt, ask in zip(body.prompt, body.asks(), strict=True):
        group = await prepare_choices(model, ask, body.n)
        echoed = await _text_of(prompt, model) if body.echo else ""
        choices += [_choice(task, echoed, has_logprobs=body.logprobs is not None) for task in group]
        tasks += group
    answer_id, token_text = f"cmpl-{uuid.uuid4().hex}", model.frontend.token_text
    return tasks, CompletionAnswer(answer_id, name, int(time.time()), token_text, choices, len(body.prompt))


async def _text_of(prompt: RawPrompt, model: ResidentModel) -> str:
    return prompt if isinstance(prompt, str) else await model.frontend.text_of(prompt)


def _choice(task: Task, echoed: str, *, has_logprobs: bool) -> Choice:
    if not has_logprobs:
        return Choice(echoed)
    return Choice(echoed, task.tokenizer.stream(()) if task.tokenizer else TokenIds(), task.request.eos)
