"""The demo model's training data: what it claims is true, and what is held out stays out."""

import ast
import doctest
import random
import re

import pytest

from tools.demo_data import arithmetic, facts, functions, mix, smalltalk, stories
from tools.demo_data.turn import Turn


def draw(kind: str, count: int, held_out: bool = False) -> list[Turn]:
    rng = random.Random(7)
    return [mix.SAMPLERS[kind](rng, held_out) for _ in range(count)]


def test_the_same_seed_gives_the_same_turns() -> None:
    first, second = random.Random(3), random.Random(3)
    assert [mix.sample(first) for _ in range(200)] == [mix.sample(second) for _ in range(200)]


@pytest.mark.parametrize("kind", mix.MEASURED)
def test_held_out_questions_are_never_trained(kind: str) -> None:
    trained = {turn.prompt for turn in draw(kind, 500)}
    assert not trained & {turn.prompt for turn in mix.held_out(kind, 50)}


@pytest.mark.parametrize("kind", mix.MEASURED)
def test_held_out_questions_are_different_and_fixed(kind: str) -> None:
    turns = mix.held_out(kind, 30)
    assert len({turn.prompt for turn in turns}) == 30
    assert turns == mix.held_out(kind, 30)


def test_a_prompt_has_one_answer() -> None:
    rng, answers = random.Random(0), {}
    for turn in (mix.sample(rng) for _ in range(2000)):
        assert answers.setdefault(turn.prompt, turn.answer) == turn.answer


def test_every_line_of_an_arithmetic_answer_is_true() -> None:
    for turn in draw(arithmetic.KIND, 150):
        for left, right in re.findall(r"([\dx +-]+)=\s?(\d+)", turn.answer):
            assert eval(left.replace("x", "*")) == int(right), turn.answer


def test_the_last_line_is_the_result_of_the_expression() -> None:
    steps = [("+", 285), ("-", 47), ("x", 3)]
    assert arithmetic.expression(12, steps) == "12 + 285 - 47 x 3"
    assert arithmetic.solution(12, steps).splitlines()[-1] == f"Answer: {(12 + 285 - 47) * 3}"


def test_written_digits_spell_the_result() -> None:
    for turn in draw(arithmetic.KIND, 100):
        for step in turn.answer.split("Step ")[1:]:
            digits = "".join(reversed(re.findall(r"write (\d)", step)))
            assert int(digits) == int(re.search(r" = (\d+)", step)[1]), step


def all_functions() -> list[str]:
    turns = draw(functions.KIND, 250) + draw(functions.KIND, 20, held_out=True)
    return sorted({turn.answer for turn in turns})


def test_every_function_parses_and_its_docstring_example_is_true() -> None:
    runner, parser = doctest.DocTestRunner(verbose=False), doctest.DocTestParser()
    for answer in all_functions():
        code = answer.removeprefix("```python\n").removesuffix("\n```")
        (function,) = ast.parse(code).body
        scope: dict[str, object] = {}
        exec(code, scope)
        test = parser.get_doctest(ast.get_docstring(function), scope, function.name, None, 0)
        assert test.examples and runner.run(test).failed == 0, answer


def test_there_are_dozens_of_function_families_and_hundreds_of_facts() -> None:
    assert len(functions.families()) >= 48
    assert len(set(facts.facts())) >= 300


def test_every_relation_has_facts_and_every_fact_is_asked() -> None:
    asked = {fact for _, fact in facts.questions()}
    assert asked == set(facts.facts())


def test_a_fact_is_listed_once_per_relation() -> None:
    keys = [(fact.relation, fact.subject) for fact in facts.facts()]
    assert len(keys) == len(set(keys))


def test_a_story_names_its_topics_and_ends() -> None:
    for hero, place, thing in [("owl", "island", "umbrella"), ("cat", "city", "key")]:
        text = stories.story(hero, place, thing)
        assert hero in text and thing in text and text.endswith("The end.")
    assert "an owl named" in stories.story("owl", "island", "key")


def test_the_model_calls_itself_the_demo_model() -> None:
    answers = {prompt: entry["answer"] for entry in smalltalk.exchanges() for prompt in entry["prompts"]}
    assert "Brigade's demo model" in answers["Who are you?"]
