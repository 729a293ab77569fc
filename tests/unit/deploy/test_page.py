"""docs/doctor.md has every finding of the code, with the levels that it may have, and no others."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from coordinator.deploy import checks, doctor
from coordinator.deploy.findings import Kind, Level

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
LEVELS = {"ok": Level.OK, "note": Level.NOTE, "problem": Level.PROBLEM}


def levels_of_the_code() -> dict[Kind, set[Level]]:
    """By the calls `ok(Kind.X, ...)`, `note(...)` and `problem(...)` of the modules that check."""
    found: dict[Kind, set[Level]] = defaultdict(set)
    for module in (checks, doctor):
        path = Path(module.__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in LEVELS:
                found[Kind[ast.unparse(node.args[0]).removeprefix("Kind.")]].add(LEVELS[ast.unparse(node.func)])
    return found


def levels_of_the_page() -> dict[Kind, set[Level]]:
    sections = re.findall(r"^### `([\w-]+)`\n\nLevels: (.*)\n\n\S", PAGE, re.MULTILINE)
    return {Kind(name): {LEVELS[each] for each in levels.split(", ")} for name, levels in sections}


def test_the_page_has_every_finding_of_the_code_with_its_levels() -> None:
    assert set(Kind) == set(levels_of_the_page())
    assert levels_of_the_code() == levels_of_the_page()
