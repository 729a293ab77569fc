"""Arithmetic in words: numbers below 1000, one to three steps, each worked out digit by digit for a small model."""

import random

from tools.demo_data.turn import Turn, is_held_out

KIND = "arithmetic"
LIMIT = 1000
PLACES = ("ones", "tens", "hundreds")

NAMES = (
    "Tom", "Anna", "Ben", "Clara", "David", "Ella", "Felix", "Grace", "Hugo", "Iris", "Jack", "Kate", "Leo", "Mia",
    "Noah", "Olga",
)  # fmt: skip
ITEMS = (
    "apples", "books", "coins", "stamps", "pencils", "marbles", "shells", "cards", "eggs", "bricks", "flowers",
    "stickers", "buttons", "cookies", "lemons", "tickets",
)  # fmt: skip
BOXES = ("boxes", "bags", "baskets", "shelves", "jars")
GAINS = (
    "{name} buys {n} more {item}.",
    "A friend gives {name} {n} {item}.",
    "{name} finds {n} {item}.",
    "Then {name} gets {n} more {item}.",
)
LOSSES = (
    "{name} gives away {n} {item}.",
    "{name} loses {n} {item}.",
    "{name} sells {n} {item}.",
    "Then {name} uses {n} {item}.",
)
GROWTHS = ("After a year there are {n} times as many {item}.", "Then the number of {item} is multiplied by {n}.")
BARE = ("What is {sum}?", "Calculate {sum}.", "Work out {sum}.", "How much is {sum}?", "{sum} = ?", "{sum}")
SPELLINGS = (
    {"+": " + ", "-": " - ", "x": " x "},
    {"+": "+", "-": "-", "x": "*"},
    {"+": " plus ", "-": " minus ", "x": " times "},
)

Step = tuple[str, int]


def sample(rng: random.Random, held_out: bool) -> Turn:
    """Draw a problem whose numbers and operations belong to the wanted set."""
    while True:
        start, steps = _draw(rng)
        if is_held_out(expression(start, steps)) == held_out:
            ask = _bare if rng.random() < 0.3 else _story
            return Turn(KIND, ask(rng, start, steps), solution(start, steps))


def expression(start: int, steps: list[Step]) -> str:
    """Write the problem from left to right, as in `12 + 30 - 5`; every step works on the result of the one before."""
    return " ".join([str(start), *(f"{operation} {n}" for operation, n in steps)])


def apply(value: int, step: Step) -> int:
    operation, n = step
    return {"+": value + n, "-": value - n, "x": value * n}[operation]


def solution(start: int, steps: list[Step]) -> str:
    """Work the steps out digit by digit and give the result on a last line, `Answer: 37`."""
    lines, value = [], start
    for number, step in enumerate(steps, 1):
        operation, n = step
        result = apply(value, step)
        lines += [
            f"Step {number}: {value} {operation} {n}",
            *_columns(value, step),
            f"{value} {operation} {n} = {result}",
        ]
        value = result
    return "\n".join([*lines, f"Answer: {value}"])


def _columns(value: int, step: Step) -> list[str]:
    operation, n = step
    if operation == "-":
        return _subtract(_digits(value), _digits(n))
    if operation == "+":
        return _add(_digits(value), _digits(n))
    return _multiply(_digits(value), n)


def _digits(value: int) -> list[int]:
    """Digits of a number, ones first."""
    return [int(digit) for digit in reversed(str(value))]


def _at(digits: list[int], place: int) -> int:
    return digits[place] if place < len(digits) else 0


def _add(a: list[int], b: list[int]) -> list[str]:
    lines, carry, place = [], 0, 0
    while place < max(len(a), len(b)) or carry:
        total = _at(a, place) + _at(b, place) + carry
        work = f"{_at(a, place)}+{_at(b, place)}+{carry}={total}"
        carry = total // 10
        lines.append(f"{PLACES[place]} {work}, write {total % 10}, carry {carry}")
        place += 1
    return lines


def _subtract(a: list[int], b: list[int]) -> list[str]:
    lines, borrow = [], 0
    for place in range(len(a)):
        rest = a[place] - _at(b, place) - borrow
        work = f"{a[place]}-{_at(b, place)}-{borrow}" + ("+10" if rest < 0 else "") + f"={rest % 10}"
        borrow = int(rest < 0)
        lines.append(f"{PLACES[place]} {work}, write {rest % 10}, borrow {borrow}")
    return lines


def _multiply(a: list[int], n: int) -> list[str]:
    lines, carry, place = [], 0, 0
    while place < len(a) or carry:
        total = _at(a, place) * n + carry
        work = f"{_at(a, place)}x{n}+{carry}={total}"
        carry = total // 10
        lines.append(f"{PLACES[place]} {work}, write {total % 10}, carry {carry}")
        place += 1
    return lines


def _draw(rng: random.Random) -> tuple[int, list[Step]]:
    start = value = _number(rng)
    steps: list[Step] = []
    for _ in range(rng.choices((1, 2, 3), (4, 3, 3))[0]):
        step = _draw_step(rng, value)
        value = apply(value, step)
        steps.append(step)
    return start, steps


def _number(rng: random.Random) -> int:
    low, high = rng.choices(((1, 10), (10, 100), (100, LIMIT)), (10, 45, 45))[0]
    return rng.randrange(low, high)


def _draw_step(rng: random.Random, value: int) -> Step:
    """Draw a step that keeps the result at 0 to LIMIT - 1."""
    while True:
        operation = rng.choice("+-x")
        step = (operation, rng.randrange(2, 10) if operation == "x" else _number(rng))
        if 0 <= apply(value, step) < LIMIT:
            return step


def _bare(rng: random.Random, start: int, steps: list[Step]) -> str:
    """Ask with signs or words for them; brackets where a product follows a sum, since steps go from left to right."""
    text, spelling = str(start), rng.choice(SPELLINGS)
    for operation, n in steps:
        text = f"({text})" if operation == "x" and not text.isdigit() else text
        text += spelling[operation] + str(n)
    return rng.choice(BARE).format(sum=text)


def _story(rng: random.Random, start: int, steps: list[Step]) -> str:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    sentences = {"+": GAINS, "-": LOSSES, "x": GROWTHS}
    text = [f"{name} has {start} {item}."]
    if steps[0][0] == "x" and rng.random() < 0.7:
        text, steps = [f"{name} has {steps[0][1]} {rng.choice(BOXES)} with {start} {item} each."], steps[1:]
    text += [rng.choice(sentences[operation]).format(name=name, item=item, n=n) for operation, n in steps]
    return " ".join([*text, f"How many {item} does {name} have?"])
