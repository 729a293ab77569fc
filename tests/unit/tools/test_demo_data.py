"""The demo model's training data: what it claims is true, and what is held out stays out."""

import ast
import doctest
import random
import re

import pytest

from tools.demo_data import arithmetic, facts, functions, mix
from tools.demo_data.turn import Turn


def draw(kind: str, count: int, held_out: bool = False) -> list[Turn]:
    rng = random.Random(7)
    return [mix.SAMPLERS[kind](rng, held_out) for _ in range(count)]


@pytest.mark.parametrize("kind", mix.MEASURED)
def test_held_out_questions_are_different_fixed_and_never_trained(kind: str) -> None:
    held_out = mix.held_out(kind, 30)
    assert len({turn.prompt for turn in held_out}) == 30 and held_out == mix.held_out(kind, 30)
    assert not {turn.prompt for turn in draw(kind, 300)} & {turn.prompt for turn in mix.held_out(kind, 50)}


def test_a_prompt_has_one_answer_and_a_seed_the_same_turns() -> None:
    rng, answers = random.Random(0), {}
    turns = [mix.sample(rng) for _ in range(1000)]
    for turn in turns:
        assert answers.setdefault(turn.prompt, turn.answer) == turn.answer
    again = random.Random(0)
    assert [mix.sample(again) for _ in range(100)] == turns[:100]


def test_every_line_of_an_arithmetic_answer_is_true() -> None:
    for turn in draw(arithmetic.KIND, 150):
        for left, right in re.findall(r"([\dx +-]+)=\s?(\d+)", turn.answer):
            assert eval(left.replace("x", "*")) == int(right), turn.answer
        for step in turn.answer.split("Step ")[1:]:
            digits = "".join(reversed(re.findall(r"write (\d)", step)))
            assert int(digits) == int(re.search(r" = (\d+)", step)[1]), step
    steps = [("+", 285), ("-", 47), ("x", 3)]
    assert arithmetic.expression(12, steps) == "12 + 285 - 47 x 3"
    assert arithmetic.solution(12, steps).splitlines()[-1] == f"Answer: {(12 + 285 - 47) * 3}"


def test_every_function_parses_and_its_docstring_example_is_true() -> None:
    runner, parser = doctest.DocTestRunner(verbose=False), doctest.DocTestParser()
    assert len(functions.families()) >= 48
    for answer in {turn.answer for turn in draw(functions.KIND, 250) + draw(functions.KIND, 20, held_out=True)}:
        code = answer.removeprefix("```python\n").removesuffix("\n```")
        (function,) = ast.parse(code).body
        scope: dict[str, object] = {}
        exec(code, scope)
        test = parser.get_doctest(ast.get_docstring(function), scope, function.name, None, 0)
        assert test.examples and runner.run(test).failed == 0, answer


def test_every_fact_is_asked_and_listed_once_per_relation() -> None:
    assert {fact for _, fact in facts.questions()} == set(facts.facts())
    keys = [(fact.relation, fact.subject) for fact in facts.facts()]
    assert len(keys) == len(set(keys)) and len(set(facts.facts())) >= 300
