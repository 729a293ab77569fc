"""lm-eval's task files, as far as they are data: local questions, templates, filters and exact match."""

import ast
import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from coordinator.engine.bounded import Texts
from coordinator.quality.questions import Question, read_file
from worker.errors import InputError

_MOST_BYTES = 1 << 20  # of a task file
_PUNCTUATION = r"[!-/:-@\[-`{-~]"  # as string.punctuation


_METRICS: dict[str, tuple[Literal["exact_match", "acc", "acc_norm"], ...]] = {
    "generate_until": ("exact_match",),
    "multiple_choice": ("acc", "acc_norm"),
}


class _Part(BaseModel):
    """Unknown keys are refused by name: they could change which answers are right."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Filter(_Part):
    function: Literal["regex", "take_first", "remove_whitespace", "lowercase", "uppercase"]
    regex_pattern: str = r"#### (\-?[0-9\.\,]+)"
    group_select: int = 0
    fallback: str = "[invalid]"


class _Chain(_Part):
    name: str = ""
    filter: list[_Filter]


class _Metric(_Part):
    metric: Literal["exact_match", "acc", "acc_norm"]
    aggregation: Literal["mean"] = "mean"
    higher_is_better: Literal[True] = True
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: list[str] = []


class _Data(_Part):
    data_files: str | dict[str, str]


class _Generation(BaseModel):
    """How answers are drawn is said by the command's flags."""

    until: list[str] | str = []


class _Task(_Part):
    dataset_path: Literal["json"]
    dataset_kwargs: _Data
    test_split: str | None = None
    validation_split: str | None = None
    description: str = ""
    doc_to_text: str
    doc_to_target: str | int
    doc_to_choice: str | list[str] = []
    output_type: Literal["generate_until", "multiple_choice"] = "generate_until"
    generation_kwargs: _Generation = _Generation()
    filter_list: list[_Chain] = []
    metric_list: list[_Metric] = []
    target_delimiter: str = " "
    fewshot_delimiter: str | None = "\n\n"  # without examples it only ends answers, where `until` is not given
    num_fewshot: Literal[0] = 0
    repeats: Literal[1] = 1
    task: Any = None  # these and the following change nothing here
    task_alias: Any = None
    tag: Any = None
    dataset_name: Any = None
    training_split: Any = None
    fewshot_split: Any = None
    should_decontaminate: Any = None
    doc_to_decontamination_query: Any = None
    metadata: Any = None


def read_task(path: Path, limit: int | None, texts: Texts) -> tuple[Question, ...]:
    """Return the questions of a task file, whose answers are generated and matched, or whose choices are scored.

    Raises:
        InputError: it is no such file, or asks for something that is not supported, such as Python code.
    """
    task = _load(path)
    generation, names = task.generation_kwargs, _METRICS[task.output_type]
    until = generation.until if "until" in generation.model_fields_set else task.fewshot_delimiter or ""
    metric = task.metric_list[0] if task.metric_list else _Metric(metric=names[0])
    if metric.metric not in names:
        raise InputError(
            "questions", f"{path}: expected {' or '.join(names)} of {task.output_type}, got {metric.metric}"
        )
    ignored = [*metric.regexes_to_ignore]
    ignored += [_PUNCTUATION] if metric.ignore_punctuation else []
    ignored += ["[0-9]"] if metric.ignore_numbers else []
    chain = task.filter_list[0].filter if task.filter_list else []
    questions, has_several = list[Question](), False
    for place, doc in _documents(path, task, limit):
        try:
            prompt = (task.description and _field(task.description, doc, texts)) + _field(task.doc_to_text, doc, texts)
            if task.output_type == "multiple_choice":
                questions.append(_scored(place, prompt, doc, task, texts, has_lengths=metric.metric == "acc_norm"))
                continue
            target = _value(str(task.doc_to_target), doc, texts)
            if not questions:
                has_several = isinstance(target, list)  # as in lm-eval: later ones may be texts like [0, 1]
            is_field = str(task.doc_to_target) in doc
            expected = target if isinstance(target, list) and (has_several or is_field) else [target]
            if not expected:
                raise InputError("", "doc_to_target: expected an answer or several, found an empty list")
            question = Question(
                place,
                prompt,
                tuple(map(str, expected)),
                "exact",
                stops=tuple(filter(None, [until] if isinstance(until, str) else until)),
                extract=tuple(step.model_dump() for step in chain if step.function != "take_first"),
                ignored=tuple(ignored),
                has_case=not metric.ignore_case,
                has_edges=True,
            )
            if not questions:
                question.is_right("", texts)  # a pattern that is none is refused now
        except InputError as error:
            raise InputError("questions", f"{path}, {place}: {error.message}") from error
        questions.append(question)
    if not questions:
        raise InputError("questions", f"expected questions in {path}, found none")
    return tuple(questions)


def _scored(
    place: str, whole: str, doc: Mapping[str, Any], task: _Task, texts: Texts, *, has_lengths: bool
) -> Question:
    """Return the question whose choices are scored after the text `whole`.

    Raises:
        InputError: the choices or the target are none.
    """
    listed = task.doc_to_choice
    if isinstance(listed, str):
        listed = _value(listed, doc, texts)
    if not isinstance(listed, list) or len(listed) < 2:
        raise InputError("", "doc_to_choice: expected a list of at least two choices")
    choices = [texts.render(each, doc) if isinstance(task.doc_to_choice, list) else str(each) for each in listed]
    found = _field(str(task.doc_to_target), doc, texts).strip()
    is_text = isinstance(doc.get(str(task.doc_to_target)), str)  # what a template makes of digits is a number
    is_number = found.isdecimal() and len(found) < 6 and not is_text
    right = int(found) if is_number else choices.index(found) if found in choices else len(choices)
    if right >= len(choices):
        raise InputError("", f"doc_to_target: expected a choice or its number from 0, found {found[:40]!r}")
    prompt = whole.rstrip() or whole  # as in lm-eval, blanks at its end are scored with each choice
    continuations = tuple(whole[len(prompt) :] + task.target_delimiter + choice for choice in choices)
    lengths = tuple(map(len, choices)) if has_lengths else ()  # in letters, as lm-eval has it
    return Question(place, prompt, (str(right),), "exact", continuations=continuations, lengths=lengths)


def _load(path: Path) -> _Task:
    try:
        return _Task.model_validate(yaml.safe_load(read_file(path, _MOST_BYTES)))
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise InputError("questions", f"{path}, line {line}: {error.problem}; code of task files is not run") from error
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as error:  # ValidationError is a ValueError
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        else:
            reason = f"expected YAML, found something else ({' '.join(str(error).split())})"
        raise InputError("questions", f"{path}: {reason}") from error


def _documents(path: Path, task: _Task, limit: int | None) -> list[tuple[str, dict[str, Any]]]:
    """Return the place and the fields of each question: JSON lines, or one JSON list, in a file beside the task's."""
    files, split = task.dataset_kwargs.data_files, task.test_split or task.validation_split
    if isinstance(files, dict):
        if split not in files:
            raise InputError("questions", f"{path}: expected a file of the split {split} in data_files")
        files = files[split]
    source = path.parent / files
    data = read_file(source)
    documents, number = list[tuple[str, Any]](), 0
    try:
        if data.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            documents = [(f"{source.name}, number {n}", doc) for n, doc in enumerate(json.loads(data), 1)]
        else:
            for number, line in enumerate(data.split(b"\n"), 1):
                if line.strip() and (limit is None or len(documents) < limit):
                    documents.append((f"{source.name}, line {number}", json.loads(line)))
    except (ValueError, RecursionError) as error:
        place = f"line {number}" if number else "the file"
        raise InputError("questions", f"{source}, {place}: expected JSON, found something else ({error})") from error
    for place, doc in documents:
        if not isinstance(doc, dict):
            raise InputError("questions", f"{place}: expected a JSON object, found {type(doc).__name__}")
    return documents[:limit]


def _value(template: str, doc: Mapping[str, Any], texts: Texts) -> Any:
    """Return a field of a question by its name, or the text or list that a template makes of them, as lm-eval does."""
    if template in doc:
        return doc[template]
    text = texts.render(template, doc)
    if text.lstrip().startswith("["):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            if isinstance(found := ast.literal_eval(text), list):
                return found
    return text


def _field(template: str, doc: Mapping[str, Any], texts: Texts) -> str:
    """Return a field, or what a template makes of them, as a text."""
    return str(doc[template] if template in doc else texts.render(template, doc))
