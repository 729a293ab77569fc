"""The mixture of all kinds: an endless stream of training turns, and fixed held-out sets."""

import random
from collections.abc import Callable

from tools.demo_data import arithmetic, facts, functions, smalltalk, stories
from tools.demo_data.turn import Turn

SAMPLERS: dict[str, Callable[[random.Random, bool], Turn]] = {
    module.KIND: module.sample for module in (arithmetic, functions, facts, stories, smalltalk)
}
WEIGHTS = {"arithmetic": 24, "code": 30, "facts": 34, "story": 10, "smalltalk": 4}
MEASURED = ("arithmetic", "code", "facts", "story")
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Brigade's demo model.",
    "You are a friendly assistant. Answer briefly.",
    "Answer the questions of the user.",
    "You are a careful assistant who explains each step.",
)


def sample(rng: random.Random) -> Turn:
    """Draw one training turn of a random kind; some prompts are typed carelessly."""
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    turn = SAMPLERS[kind](rng, False)
    return turn._replace(prompt=_careless(turn.prompt, rng))


def held_out(kind: str, count: int, seed: int = 1) -> list[Turn]:
    """The first `count` different held-out turns of a kind; fewer where a kind has fewer."""
    if kind == facts.KIND:
        turns = facts.all_held_out()
        random.Random(seed).shuffle(turns)
        return turns[:count]
    rng = random.Random(seed)
    found: dict[str, Turn] = {}
    for _ in range(20 * count):
        turn = SAMPLERS[kind](rng, True)
        found.setdefault(turn.prompt, turn)
        if len(found) == count:
            break
    return list(found.values())


def _careless(prompt: str, rng: random.Random) -> str:
    """Leave out capitals or the last sign now and then, as people do."""
    if rng.random() < 0.08:
        prompt = prompt.lower()
    if rng.random() < 0.08:
        prompt = prompt.rstrip("?.!")
    return prompt
