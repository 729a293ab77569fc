"""Choices: what chats and completions share, which both may have several answers to one prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coordinator.http.errors import HttpError
from coordinator.http.streams import data
from coordinator.resident.ask import Ask
from coordinator.resident.channels import Delta
from coordinator.resident.frontend import Task
from coordinator.resident.model import ResidentModel
from coordinator.shapes.answers import figures_of
from protos.brigade_pb2 import Sampling


async def prepare_choices(model: ResidentModel, ask: Ask, n: int) -> list[Task]:
    """`n` tasks of one ask. The seed counts up: answers differ, and can be had again where it was given."""
    first = await model.prepare(ask)
    return [first, *(_with_other_seed(first, k) for k in range(1, n))]


def _with_other_seed(task: Task, k: int) -> Task:
    sampling = Sampling()
    sampling.CopyFrom(task.request.sampling)
    sampling.seed = (sampling.seed + k) % 2**64
    return replace(task, request=replace(task.request, sampling=sampling))


def figures(lasts: Sequence[Delta]) -> Any:
    """What windows, recoveries and prefixes made of it; a list where there are several choices."""
    found = [figures_of(last) for last in lasts]
    return found[0] if len(found) == 1 else found


def tell(error: HttpError) -> bytes:
    """An error in the middle of a stream, as OpenAI's clients know it."""
    return data(error.to_openai())
