"""Files of questions for `brigade eval`: JSON lines, the built-in sets, and the task files of lm-eval."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal, get_args

from coordinator.engine.bounded import Texts
from coordinator.sessions.request import require_text
from worker.errors import InputError
from worker.platform.text import counted

Check = Literal["last-number", "exact", "contains", "regex", "choice"]
CHECKS: tuple[Check, ...] = get_args(Check)
BUILT_IN = ("arithmetic", "code", "facts", "translation", "story")
_SETS = Path(__file__).with_name("sets")

_MOST_BYTES = 64 << 20  # of a file
_MOST_PROBLEMS = 10  # that an error names
_MOST_CHOICES = 26
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:(?:(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d|,\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)")
_LETTER = re.compile(r"\b([A-Z])\b")
_ANSWER = re.compile(r"(?i:answer)(?:\s+(?i:is))?[\s:=*_(\"']+([A-Z])\b")
_GSM8K = "####"  # before the result, at the end of GSM8K's worked answers


@dataclass(frozen=True)
class Question:
    """A prompt, and how the answer to it is judged."""

    place: str  # the file and the line that it comes from
    prompt: str
    expected: tuple[str, ...]  # any of them is right: texts, one number, one regular expression, or one letter
    check: Check
    stops: tuple[str, ...] = ()
    extract: tuple[Mapping[str, Any], ...] = ()  # filters of lm-eval, which make of an answer what is compared
    ignored: tuple[str, ...] = ()  # regular expressions that `exact` deletes from both sides
    last_letter: str = "Z"  # of the choices
    has_case: bool = True  # whether `exact` tells upper from lower case
    has_edges: bool = False  # whether `exact` compares blanks at both ends
    continuations: tuple[str, ...] = ()  # of the raw prompt, which are scored: the answer is the number of the best one
    lengths: tuple[int, ...] = ()  # by which their log-probabilities are divided, if by any

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Raise the InputError of this block as one that tells where the question comes from."""
        try:
            yield
        except InputError as error:
            is_own = error.field.partition(".")[0] in ("prompt", "messages", "continuations")
            field = "questions" if is_own else error.field
            raise InputError(field, f"{self.place}: {error.message}") from error

    def best(self, logprobs: Sequence[float]) -> int:
        """Return the number of the continuation that the model finds likeliest."""
        lengths = self.lengths or [1] * len(logprobs)
        scores = [logprob / max(1, length) for logprob, length in zip(logprobs, lengths, strict=True)]
        return scores.index(max(scores))

    def is_right(self, answer: str, texts: Texts) -> bool:
        """Return whether an answer passes the check. Raises InputError for a regular expression that takes too long."""
        for step in self.extract:
            answer = _extracted(answer, step, texts)
        if self.check == "last-number":
            found = _numbers(answer)
            return bool(found) and found[-1] == _numbers(self.expected[0])[-1]
        if self.check == "regex":
            return bool(texts.find_all(self.expected[0], answer))
        if self.check == "choice":
            letters = [*_ANSWER.findall(answer)[-1:], *_LETTER.findall(answer)]
            return next((each for each in letters if each <= self.last_letter), "") == self.expected[0]
        if self.check == "contains":
            return any(text.casefold() in answer.casefold() for text in self.expected)
        return self._comparable(answer, texts) in {self._comparable(text, texts) for text in self.expected}

    def _comparable(self, text: str, texts: Texts) -> str:
        for pattern in self.ignored:
            text = texts.without(pattern, text)
        text = text if self.has_edges else text.strip()
        return text if self.has_case else text.casefold()


def read_questions(source: str, check: Check | None, limit: int | None, texts: Texts) -> tuple[Question, ...]:
    """Return the questions of a file of JSON lines, of a built-in set or of a task file of lm-eval (YAML).

    Args:
        check: how answers are judged where a line does not say so.
        limit: read this many only.
    Raises:
        InputError: the file cannot be read; it names the lines that are no questions.
    """
    path = _SETS / f"{source}.jsonl" if source in BUILT_IN else Path(source)
    if path.suffix in (".yaml", ".yml"):
        from coordinator.quality.lm_eval import read_task

        return read_task(path, limit, texts)
    found, problems = list[Question](), list[str]()
    lines = read_file(path).split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip() and (limit is None or len(found) < limit):
            try:
                question = _question(f"{path.name}, line {number}", json.loads(line), check, texts)
                require_text("prompt", question.prompt)
                found.append(question)
            except InputError as error:
                problems.append(f"line {number}: {error}")
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number}: expected a JSON object, found something else ({error})")
    if problems:
        more = f"; and {counted(len(problems) - _MOST_PROBLEMS, 'line')} more" if len(problems) > _MOST_PROBLEMS else ""
        raise InputError("questions", f"{path}, {'; '.join(problems[:_MOST_PROBLEMS])}{more}")
    if not found:
        raise InputError("questions", f"expected questions in {path}, found none")
    return tuple(found)


def read_file(path: Path, most: int = _MOST_BYTES) -> bytes:
    """Raises InputError if it cannot be read, or is larger than `most` bytes."""
    try:
        with open(path, "rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        sets = f" (built-in sets: {', '.join(BUILT_IN)})" if not path.suffix else ""
        raise InputError("questions", f"{path} cannot be read: {error.strerror}{sets}") from error
    if len(found) > most:
        raise InputError("questions", f"expected a file of at most {most >> 20} MiB, found more in {path}")
    return found


def _question(place: str, line: Any, check: Check | None, texts: Texts) -> Question:
    """Return the question of a line. Raises InputError."""
    if not isinstance(line, dict):
        raise InputError("", f"expected a JSON object, found {type(line).__name__}")
    prompt = line.get("prompt", line.get("question"))
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError("", "expected a prompt (or question), a text")
    kind = line.get("check", check)
    if kind is None:
        raise InputError("", f"expected a check, here or by --check: {', '.join(CHECKS)}")
    if kind not in CHECKS:
        raise InputError("check", f"expected {', '.join(CHECKS)}, found {kind!r}")
    answer = line.get("answer")
    if kind == "choice":
        return _choice(place, prompt, line.get("choices"), answer)
    expected = tuple(map(_as_text, answer if isinstance(answer, list) else [answer]))
    if not expected or (len(expected) > 1 and kind in ("last-number", "regex")):
        raise InputError("answer", f"expected one, found {len(expected)}")
    if kind == "last-number":
        expected = (expected[0].rpartition(_GSM8K)[2],)
        if not _numbers(expected[0]):
            raise InputError("answer", f"expected a number, found {expected[0][:40]!r}")
    if kind == "regex":
        texts.find_all(expected[0], "")
    return Question(place, prompt, expected, kind)


def _choice(place: str, prompt: str, choices: Any, answer: Any) -> Question:
    """Return a question whose answer is the letter of a choice; `answer` is a letter, a number from 0, or a choice."""
    is_listed = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    if not is_listed or not 2 <= len(choices) <= _MOST_CHOICES:
        raise InputError("choices", f"expected a list of 2 to {_MOST_CHOICES} texts")
    letters = [chr(ord("A") + number) for number in range(len(choices))]
    names = {**dict(zip(letters, letters, strict=True)), **dict(zip(choices, letters, strict=True))}
    right = names.get(answer) if isinstance(answer, str) else None
    if type(answer) is int and 0 <= answer < len(letters):
        right = letters[answer]
    if right is None:
        raise InputError("answer", f"expected a letter up to {letters[-1]}, a number from 0, or one of the choices")
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, choices, strict=True))
    asked = f"{prompt}\n{listed}\nAnswer with the letter only."
    return Question(place, asked, (right,), "choice", last_letter=letters[-1])


def _as_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise InputError("answer", "expected a text or a number, or a list of them")
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(str(value)), "f")  # without an exponent
    return str(value)


def _numbers(text: str) -> list[Decimal]:
    """Return the numbers of a text: `1,234.50` and `.5` are one each, and the -3 of `is -3`, but not that of `5-3`."""
    found = []
    for each in _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-")):
        try:
            found.append(Decimal(each.replace(",", "")))
        except InvalidOperation:  # a number as no context allows it
            continue
    return found


def _extracted(answer: str, step: Mapping[str, Any], texts: Texts) -> str:
    """Apply a filter as lm-eval defines it."""
    kind = step["function"]
    if kind == "remove_whitespace":
        return answer.lstrip()
    if kind in ("lowercase", "uppercase"):
        return answer.lower() if kind == "lowercase" else answer.upper()
    matches = texts.find_all(step["regex_pattern"], answer)
    try:
        match = matches[step["group_select"]]
    except IndexError:
        return str(step["fallback"])
    groups = [group for group in match if group] if isinstance(match, list | tuple) else [match]
    return str(groups[0]).strip() if groups else str(step["fallback"])
