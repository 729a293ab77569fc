"""Questions of `brigade eval`: what is read, what is refused, and which answers are right."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.engine.bounded import Bounds, Texts
from coordinator.quality.accuracy import EvalAnswer, accuracy_row, eval_answer, wilson
from coordinator.quality.questions import BUILT_IN, Check, Question, read_questions
from coordinator.sessions.output import Output, Token, Usage
from worker.errors import InputError

ENDLESS = r"(a+)+$"
LONG = "a" * 40 + "b"


@pytest.fixture(scope="module")
def texts() -> Iterator[Texts]:
    yield Texts(Bounds(seconds=5.0))


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def question(check: Check, *expected: str, **more: Any) -> Question:
    return Question("here", "?", expected, check, **more)


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        (
            question("last-number", "1234.5"),
            ("so 7, and then 1,234.50.", "$1234.5"),
            ("1234.5 or 3", "none", "-1234.5"),
        ),
        (question("last-number", "-3"), ("it is -3", "x = \N{MINUS SIGN}3"), ("5-3", "3")),
        (question("last-number", "0.5"), ("it is .5", "0.50"), ("No.5", "0,5")),
        (question("last-number", "30"), ("10,20,30",), ("1,030",)),
        (question("last-number", "100"), ("8,9,100", "8, 9, 100"), ("9,100",)),
        (question("exact", "Yes, it is"), (" Yes, it is\n",), ("yes, it is", "Yes, it is.")),
        (question("exact", "a", "b"), ("b",), ("c", "ab")),
        (question("contains", "Vienna", "Wien"), ("in VIENNA.", "Wien"), ("Venice",)),
        (question("regex", r"^x = \d+$"), ("x = 12",), ("y = 12",)),
        (
            replace(question("choice", "B"), last_letter="D"),
            (
                "B",
                "(B) is it",
                "The answer is B.",
                "I think B",
                "A: the answer is B",
                "Question: Q. **Answer:** B",
                "Answer: B. The other answer, D, is wrong",
                "B is the answer, C is not",
                "B, not A",
            ),
            ("A or B", "b", "", "I", "The answer is B? No, the answer is A"),
        ),
    ],
    ids=lambda value: value.check if isinstance(value, Question) else "",
)
def test_checks_judge_answers(texts: Texts, asked: Question, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    assert [asked.is_right(answer, texts) for answer in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


def test_lines_are_read_in_every_form_and_the_built_in_sets_have_twenty_each(texts: Texts, tmp_path: Path) -> None:
    path = write(
        tmp_path / "q.jsonl",
        {"question": "How many?", "answer": "Two and two are four.\n#### 1,004"},
        {"prompt": "Which?", "choices": ["red", "blue"], "answer": 1, "check": "choice"},
        {"prompt": "Which?", "choices": ["red", "blue"], "answer": "red", "check": "choice"},
        "",
        {"prompt": "Say it", "answer": ["a", 5, 1e-05, 1e20], "check": "contains"},
    )
    found = read_questions(path, "last-number", None, texts)
    expected = [(" 1,004",), ("B",), ("A",), ("a", "5", "0.00001", "100000000000000000000")]
    assert [each.expected for each in found] == expected
    assert [each.place for each in found] == [f"q.jsonl, line {number}" for number in (1, 2, 3, 5)]
    assert "B. blue" in found[1].prompt and found[0].is_right("1004", texts)
    for name in BUILT_IN:
        assert len({each.prompt for each in read_questions(name, None, None, texts)}) == 20
    assert len(read_questions("facts", None, 3, texts)) == 3


def test_every_broken_line_is_refused_by_its_number(texts: Texts, tmp_path: Path) -> None:
    good = {"prompt": "a", "answer": "b"}
    broken = (
        "{", "[1]", "null", {"answer": "b"}, {"prompt": 5, "answer": "b"}, {"prompt": "a"}, good | {"answer": []},
        good | {"answer": {}}, good | {"check": "eval"}, good | {"check": "last-number"}, good | {"check": "choice"},
        good | {"check": "choice", "choices": ["x", "y"], "answer": "z"}, good | {"check": "regex", "answer": "(("},
        good | {"check": "regex", "answer": "(" * 9000}, "[" * 100_000, good | {"prompt": "\ud800"},
        good | {"check": "choice", "choices": ["x", "\ud800"], "answer": "x"},
        good | {"check": "choice", "choices": ["x", "y"], "answer": ["x"]},
    )  # fmt: skip
    for number, line in enumerate(broken):
        path = write(tmp_path / "q.jsonl", *[good] * number, line)
        with pytest.raises(InputError) as refusal:
            read_questions(path, "exact", None, texts)
        assert refusal.value.field == "questions" and f"line {number + 1}: " in refusal.value.message
    for check in (None, "exact"):
        with pytest.raises(InputError) as refusal:
            read_questions(write(tmp_path / "none.jsonl", *[good] * (check is None)), check, None, texts)  # type: ignore[arg-type]
        assert refusal.value.field == "questions"


def test_an_expression_without_end_and_a_hostile_template_are_bounded_and_the_next_one_is_served() -> None:
    texts = Texts(Bounds(seconds=0.5))
    with pytest.raises(InputError, match="took longer than"):
        question("regex", ENDLESS).is_right(LONG, texts)
    for template, said in (("{{ ''.__class__.__mro__ }}", "unsafe"), ("{{ missing }}", "undefined"), ("{% raw", ".")):
        with pytest.raises(InputError, match=said):
            texts.render(template, {})
    assert texts.render("{{ a }}\n", {"a": 5}) == "5\n"


TASK = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: docs.jsonl}}
test_split: test
output_type: generate_until
description: "{{ how }}. "
doc_to_text: "Q: {{ question }}\\nA:"
doc_to_target: "{{ answer.split('####')[-1].strip() }}"
generation_kwargs: {until: ["Q:"], do_sample: false}
filter_list:
  - name: strict
    filter: [{function: regex, regex_pattern: "is (-?[0-9.,]+)"}, {function: take_first}]
metric_list: [{metric: exact_match, ignore_case: true, ignore_punctuation: false, regexes_to_ignore: [",", "\\\\."]}]
num_fewshot: 0
metadata: {version: 1.0}
"""

TARGET = "\"{{ answer.split('####')[-1].strip() }}\""


def task_questions(folder: Path, texts: Texts, task: str, *docs: dict[str, Any]) -> list[Question]:
    """The questions of a task file and its data."""
    write(folder / "docs.jsonl", *docs)
    (folder / "task.yaml").write_text(task)
    return read_questions(str(folder / "task.yaml"), None, None, texts)


def test_a_task_file_of_lm_eval_is_read_as_data(texts: Texts, tmp_path: Path) -> None:
    doc = {"how": "Answer", "question": "1+1?", "answer": "two #### 1,002"}
    [found] = task_questions(tmp_path, texts, TASK, doc)
    assert (found.prompt, found.expected, found.stops) == ("Answer. Q: 1+1?\nA:", ("1,002",), ("Q:",))
    answers = ("it is 1,002. It is 5", "is 1002", "is 1003", "1002")
    assert [found.is_right(answer, texts) for answer in answers] == [True, True, False, False]


def test_questions_of_a_task_are_lines_or_a_list_also_after_a_byte_order_mark(texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(TASK)
    docs = [json.dumps({"how": "Answer", "question": each, "answer": "2"}) for each in ("1+1?", "3-1?")]
    for data in ("\n".join(docs), f" [{docs[0]},\n{docs[1]}]"):
        for encoding in ("utf-8", "utf-8-sig"):
            (tmp_path / "docs.jsonl").write_text(data, encoding=encoding)
            found = read_questions(str(tmp_path / "task.yaml"), None, None, texts)
            assert [each.prompt for each in found] == [f"Answer. Q: {each}\nA:" for each in ("1+1?", "3-1?")]


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        ("generation_kwargs: {do_sample: false}", ("\n\n",)),
        ('fewshot_delimiter: "\\n"', ("\n",)),
        ('{fewshot_delimiter: "\\n", generation_kwargs: {until: []}}', ()),
        ('{generation_kwargs: {until: ["", "Q:"]}}', ("Q:",)),
        ("fewshot_delimiter: null", ()),
    ],
)
def test_answers_end_at_the_delimiter_of_examples_unless_the_task_says_where(
    texts: Texts, tmp_path: Path, given: str, stops: tuple[str, ...]
) -> None:
    task = yaml.safe_load(TASK)
    del task["generation_kwargs"]
    doc = {"how": "Answer", "question": "1+1?", "answer": "2"}
    [found] = task_questions(tmp_path, texts, json.dumps(task | yaml.safe_load(given)), doc)
    assert found.stops == stops


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aliases", ("Wien", "7")),
        ('"{{ aliases }}"', ("Wien", "7")),
        ("listed", ("['a', 'b']",)),
        ("\"{{ '[a' }}\"", ("[a",)),
        ('"[1], [2]"', ("[1], [2]",)),
        ("none", None),
    ],
)
def test_a_target_of_a_task_file_may_be_several(
    texts: Texts, tmp_path: Path, target: str, expected: tuple[str, ...] | None
) -> None:
    doc = {"how": "Say", "question": "Where?", "aliases": ["Wien", 7], "listed": "['a', 'b']", "none": []}
    task = TASK.replace(TARGET, target)
    if expected is None:
        with pytest.raises(InputError, match=r"line 1: doc_to_target: .* empty list"):
            task_questions(tmp_path, texts, task, doc)
    else:
        [found] = task_questions(tmp_path, texts, task, doc)
        assert found.expected == expected


@pytest.mark.parametrize(
    ("target", "answers", "expected"),
    [
        ("answer", ("Wien", ["Rom", 7]), [("Wien",), ("Rom", "7")]),
        ('"{{ answer }}"', ("5", "[0, 1]"), [("5",), ("[0, 1]",)]),
        ('"{{ answer }}"', ("[5]", "[0, 1]"), [("5",), ("0", "1")]),
    ],
)
def test_the_first_target_tells_whether_a_text_with_brackets_is_a_list_and_a_list_always_is_one(
    texts: Texts, tmp_path: Path, target: str, answers: Sequence[Any], expected: list[tuple[str, ...]]
) -> None:
    docs = [{"how": "Say", "question": "Where?", "answer": answer} for answer in answers]
    found = task_questions(tmp_path, texts, TASK.replace(TARGET, target), *docs)
    assert [each.expected for each in found] == expected


CHOICES = """
dataset_path: json
dataset_kwargs: {data_files: {test: docs.jsonl}}
test_split: test
output_type: multiple_choice
description: "{{ hint | default('') }}"
doc_to_text: "{{ question }}"
doc_to_choice: DOC_TO_CHOICE
doc_to_target: DOC_TO_TARGET
metric_list: [{metric: acc_norm}]
"""


@pytest.mark.parametrize(
    ("choices", "target"),
    [
        ("options", "gold"),
        ('["{{options[0]}}", "{{options[1]}}"]', '"{{gold}}"'),
        ('"{{options}}"', "name"),
        ("options", "1"),
    ],
)
def test_choices_of_a_task_file_are_scored(texts: Texts, tmp_path: Path, choices: str, target: str) -> None:
    doc = {"question": "Which?", "options": ["a", "long one"], "gold": 1, "name": "long one"}
    task = CHOICES.replace("DOC_TO_CHOICE", choices).replace("DOC_TO_TARGET", target)
    [found] = task_questions(tmp_path, texts, task, doc)
    assert (found.prompt, found.continuations, found.expected) == ("Which?", (" a", " long one"), ("1",))
    assert [found.best(logprobs) for logprobs in ((-1.0, -7.0), (-0.5, -7.0))] == [1, 0], "by letter"
    for field, wrong in (("gold", 2), ("options", ["a"])):
        doc = {"question": "Which?", "options": ["a", "b"], "gold": 1, "name": "b"} | {field: wrong}
        if field == "gold" and target in ("name", "1"):
            continue
        with pytest.raises(InputError, match="line 1: "):
            task_questions(tmp_path, texts, task, doc)


def test_a_choice_of_digits_is_told_by_its_text_if_the_target_is_one(texts: Texts, tmp_path: Path) -> None:
    task = CHOICES.replace("DOC_TO_CHOICE", "options").replace("DOC_TO_TARGET", "gold")
    doc = {"question": "Which?", "options": ["1", "2", "3"]}
    for gold, expected in (("2", "1"), (2, "2"), ("3", "2")):
        [found] = task_questions(tmp_path, texts, task, doc | {"gold": gold})
        assert found.expected == (expected,)
    with pytest.raises(InputError, match="found '0'"):
        task_questions(tmp_path, texts, task, doc | {"gold": "0"})


def test_listed_choices_are_texts_also_where_fields_have_their_names(texts: Texts, tmp_path: Path) -> None:
    task = CHOICES.replace("DOC_TO_CHOICE", '["A", "B"]').replace("DOC_TO_TARGET", "gold")
    [found] = task_questions(tmp_path, texts, task, {"question": "Which?", "A": "Rome", "B": "Paris", "gold": "B"})
    assert (found.continuations, found.expected) == ((" A", " B"), ("1",))


def test_blanks_at_the_end_of_a_prompt_are_scored_with_each_choice(texts: Texts, tmp_path: Path) -> None:
    task = CHOICES.replace("DOC_TO_CHOICE", "options").replace("DOC_TO_TARGET", "1") + 'target_delimiter: ""'
    doc = {"hint": "Tell: ", "question": "Which? \n", "options": ["a", "long one"]}
    [found] = task_questions(tmp_path, texts, task, doc)
    assert (found.prompt, found.continuations) == ("Tell: Which?", (" \na", " \nlong one"))
    assert found.lengths == (1, 8), "of the choices alone, as in lm-eval"
    [found] = task_questions(tmp_path, texts, task, {"hint": "", "question": " ", "options": ["a", "b"]})
    assert (found.prompt, found.continuations) == (" ", ("a", "b")), "something has to precede them"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("task: mine", "process_docs: !function utils.process", "line 2: .*!function"),
        ("task: mine", "process_docs: utils.process", "process_docs: Extra inputs"),
        ("generate_until", "loglikelihood", "output_type: .*generate_until"),
        ("generate_until", "multiple_choice", "expected acc or acc_norm of multiple_choice, got exact_match"),
        ("num_fewshot: 0", "num_fewshot: 5", "num_fewshot: .* 0"),
        ("metric: exact_match", "metric: bleu", "metric_list.0.metric: .*acc"),
        ("function: take_first", "function: majority_vote", "filter_list.0.filter.1.function"),
        ("filter: [{", "filter: {a: [{", "expected YAML"),
        ("num_fewshot: 0", "metric: 5", "metric: Extra"),
        ("is (-?[0-9.,]+)", "(", "the regular expression cannot be used"),
        ("{{ question }}", "{{ nothing }}", "docs.jsonl, line 1: the template .*'nothing' is undefined"),
        ("docs.jsonl", "absent.jsonl", "absent.jsonl cannot be read"),
        ("task: mine", "task: [", "expected YAML"),
        ("task: mine", "task: 2024-13-45", "expected YAML"),
    ],
)
def test_task_files_beyond_data_are_refused(texts: Texts, tmp_path: Path, old: str, new: str, said: str) -> None:
    assert TASK.count(old) == 1
    doc = {"how": "Answer", "question": "1+1?", "answer": "two #### 1,002"}
    with pytest.raises(InputError, match=said) as refusal:
        task_questions(tmp_path, texts, TASK.replace(old, new), doc)
    assert refusal.value.field == "questions" and "\n" not in refusal.value.message


def test_the_interval_is_wilsons() -> None:
    """Against the table of Newcombe (1998), Statistics in Medicine 17, method 3."""
    for right, num, low, high in (
        (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718),
    ):  # fmt: skip
        assert wilson(right, num) == pytest.approx((low, high), abs=5e-5)


def test_rows_are_those_after_the_prompt_and_times_those_of_the_whole_request() -> None:
    usage = Usage(num_prompt=10, started=1_000_000, num_reused=4, num_steps=2, num_rows=14, num_generated=3)
    first = Output("ab", [Token(1)], 1_000_000, content="b")
    found = eval_answer([first, Output("c", [Token(2), Token(3)], 9_000_000, "stop", usage, content="c")])
    assert found == EvalAnswer("bc", "stop", tokens=3, steps=2, rows=8, ms=8.0)
    other = EvalAnswer("x", "stop", tokens=1, steps=1, rows=0, ms=0.0)
    row = accuracy_row("q", "diffusion", [found, other], [True, False], [other, other])
    assert (row.num_right, row.equal_to_ar) == (1, 0.5)
    assert (row.tokens_per_step, row.rows_per_token, row.ms_per_token) == (4 / 3, 4.0, 2.0)
