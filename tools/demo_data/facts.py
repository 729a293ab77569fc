"""Questions about facts: facts.tsv holds what is true, relations.toml the ways to ask, one of which is held out."""

import functools
import random
import tomllib
from pathlib import Path
from string import Template
from typing import NamedTuple

from tools.demo_data.turn import Turn

KIND = "facts"


class Fact(NamedTuple):
    relation: str
    subject: str
    answer: str


class Relation(NamedTuple):
    """Ways to ask for one kind of fact; `$s` stands for the subject and `$a` for the answer."""

    answer: str
    trained: list[str]
    held_out: str
    facts: str | None = None


@functools.cache
def facts() -> tuple[Fact, ...]:
    """Read facts.tsv: lines of relation, subject and answer, parted by tabs."""
    lines = Path(__file__).with_name("facts.tsv").read_text().splitlines()
    return tuple(Fact(*line.split("\t")) for line in lines if line and not line.startswith("#"))


@functools.cache
def questions() -> tuple[tuple[Relation, Fact], ...]:
    """Every pair of a relation and a fact that it can ask for."""
    table = tomllib.loads(Path(__file__).with_name("relations.toml").read_text())
    relations = {name: Relation(**entry) for name, entry in table.items()}
    return tuple(
        (relation, fact)
        for name, relation in relations.items()
        for fact in facts()
        if fact.relation == (relation.facts or name)
    )


def sample(rng: random.Random, held_out: bool) -> Turn:
    """Draw a question in a trained phrasing or in the held-out one."""
    relation, fact = rng.choice(questions())
    return _turn(relation, fact, relation.held_out if held_out else rng.choice(relation.trained))


def all_held_out() -> list[Turn]:
    """Every question in its held-out phrasing, in the order of the files."""
    return [_turn(relation, fact, relation.held_out) for relation, fact in questions()]


def _turn(relation: Relation, fact: Fact, phrasing: str) -> Turn:
    prompt, answer = (Template(text).substitute(s=fact.subject, a=fact.answer) for text in (phrasing, relation.answer))
    return Turn(KIND, _capital(prompt), _capital(answer), relation.answer)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
