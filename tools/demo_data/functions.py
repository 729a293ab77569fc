"""Small Python functions asked for in words and answered by a code block whose docstring example is true."""

import functools
import random
import tomllib
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from tools.demo_data.turn import Turn, is_held_out

KIND = "code"
WORDS = (
    "do", "get", "make", "find", "run", "calc", "check", "apply", "test", "use", "build", "solve", "handle",
    "compute", "process", "it", "value", "result", "thing", "data", "task", "job", "step", "part", "number", "text",
    "stuff", "case", "item", "answer", "list", "word", "count", "last", "first", "new", "my", "big",
)  # fmt: skip
ASKS = (
    "Write a Python function $name that $ask.",
    "Please write a Python function called $name that $ask.",
    "Define a Python function $name that $ask.",
    "I need a Python function named $name that $ask.",
    "Can you write a function $name in Python that $ask?",
)
NAMELESS_ASKS = ("Write a Python function that $ask.", "Write a function that $ask.", "Show me Python code that $ask.")
ANSWER = '''```python
def $name($args):
    """$doc

    >>> $name($call)
    $result
    """
$body
```'''


class Family(NamedTuple):
    """Functions that differ in a few parameters. Texts use `$n` and the like for them; see functions.toml."""

    names: tuple[str, ...]
    ask: str
    args: str
    doc: str
    call: str
    body: str
    params: Mapping[str, list[Any]]


@functools.cache
def families() -> tuple[Family, ...]:
    """Read functions.toml."""
    table = tomllib.loads(Path(__file__).with_name("functions.toml").read_text())
    return tuple(Family(**{"params": {}, **entry, "names": tuple(entry["names"])}) for entry in table["family"])


def sample(rng: random.Random, held_out: bool) -> Turn:
    """Draw a request whose family, parameters and function name together belong to the wanted set."""
    while True:
        family = rng.choice(families())
        values = {key: str(_draw(rng, choice)) for key, choice in sorted(family.params.items())}
        asks, name = _name(rng, family)
        name = Template(name).substitute(values)
        can_be_known = asks is ASKS or bool(values)  # a name that is neither asked for nor trained is anybody's guess
        if (can_be_known and is_held_out(f"{name} {family.ask} {values}")) == held_out:
            ask = Template(rng.choice(asks)).substitute(name=name, ask=Template(family.ask).substitute(values))
            return Turn(KIND, ask, answer(family, name, values), family.body)


def _name(rng: random.Random, family: Family) -> tuple[tuple[str, ...], str]:
    """Choose phrasings and a function name: the family's first if none is asked, one that fits, or an invented one."""
    style = rng.random()
    if style < 0.2:
        return NAMELESS_ASKS, family.names[0]
    if style < 0.5:
        return ASKS, rng.choice(family.names)
    return ASKS, "_".join(_word(rng) for _ in range(rng.choices((1, 2, 3), (3, 5, 2))[0]))


def _word(rng: random.Random) -> str:
    """A word of a function name, real or made of syllables, so that names have to be copied and cannot be learnt."""
    if rng.random() < 0.6:
        return rng.choice(WORDS)
    return "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))


def answer(family: Family, name: str, values: Mapping[str, str]) -> str:
    """Write the function as a Markdown code block."""
    parts = {field: Template(getattr(family, field)).substitute(values) for field in ("args", "doc", "call", "body")}
    parts["body"] = "\n".join("    " + line if line else "" for line in parts["body"].strip().splitlines())
    result = _result(parts["args"], parts["body"], parts["call"])
    return Template(ANSWER).substitute(parts, name=name, result=result)


def _draw(rng: random.Random, choice: list[Any]) -> Any:
    """Two integers mean a range with both ends included, anything else a list to choose from."""
    if len(choice) == 2 and all(isinstance(end, int) for end in choice):
        return rng.randint(*choice)
    return rng.choice(choice)


@functools.lru_cache(maxsize=100_000)
def _result(args: str, body: str, call: str) -> str:
    """Run the function to get what its docstring example must show."""
    scope: dict[str, Any] = {}
    exec(f"def example({args}):\n{body}", scope)  # our own text, from functions.toml
    return repr(eval(f"example({call})", scope))
