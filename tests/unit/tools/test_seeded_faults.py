"""The seeded faults fit the code, and the tool finds the test that catches one."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tools.seeded_faults import FAULTS, ROOT, Fault, choose_tests, load, measure
from worker.errors import InputError

ALL = load(FAULTS)
SEVEN = "tests/unit/test_seven.py::test_it"


@cache
def code_of(file: str) -> CodeType:
    return compile((ROOT / file).read_text(), file, "exec")


def test_every_fault_has_a_name_of_its_own_changes_one_place_and_leaves_python() -> None:
    assert [name for name, count in Counter(fault.name for fault in ALL).items() if count > 1] == []
    for fault in ALL:
        assert compile(fault.seeded(ROOT), fault.file, "exec") != code_of(fault.file), fault.name


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for path, text in {
        "coordinator/__init__.py": "",
        "coordinator/sums.py": "def total(a, b):\n    return a + b\n\n\ndef half(a):\n    return a // 2\n",
        "tests/__init__.py": "",
        "tests/unit/__init__.py": "",
        "tests/unit/numbers.py": "from coordinator.sums import total\n\nTOTAL = total(3, 4)\n",
        "tests/unit/test_others.py": "def test_nothing():\n    pass\n",
        "tests/unit/test_seven.py": "from tests.unit.numbers import TOTAL\n\ndef test_it():\n    assert TOTAL == 7\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_tests_that_import_the_module_through_a_helper_come_first(project: Path) -> None:
    chosen = choose_tests(project, "coordinator/sums.py")
    assert chosen == {"unit": ["tests/unit/test_seven.py"], "integration": [], "rest": ["tests/unit/test_others.py"]}


MINUS = Fault("sums", "minus", "a total adds", "coordinator/sums.py", "a + b", "a - b")


def measured(project: Path, faults: list[Fault], first: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The row of each fault."""
    rows: dict[str, dict[str, Any]] = {}
    assert [*measure(project, faults, 1, rows, first or {})]
    return rows


def test_a_fault_is_caught_by_the_test_that_fails_and_else_missed(project: Path) -> None:
    third = Fault("sums", "third", "a half is the half", "coordinator/sums.py", "a // 2", "a // 3")
    rows = measured(project, [MINUS, third])
    found = {name: (row["result"], row["stage"], row["test"]) for name, row in rows.items()}
    assert found == {"minus": ("caught", "unit", SEVEN), "third": ("MISSED", "", "")}
    assert "a + b" in (project / "coordinator/sums.py").read_text()


def test_a_test_that_fails_without_a_fault_proves_nothing(project: Path) -> None:
    failing = "import coordinator.sums\n\n\ndef test_seven():\n    assert False\n"
    (project / "tests/unit/test_seven.py").write_text(failing)
    assert measured(project, [MINUS])["minus"]["result"] == "UNSURE"


def test_only_a_failed_test_catches_and_the_test_of_an_earlier_run_is_tried_first(project: Path) -> None:
    missing = Fault("sums", "import", "it is imported", MINUS.file, "def half", "import missing\n\n\ndef half")
    first = {"import": "tests/unit/test_gone.py::test_it", "minus": "tests/unit/test_seven.py::test_its_old_name"}
    rows = measured(project, [missing, MINUS], first)
    found = {name: (row["result"], row["stage"], row["test"][:20]) for name, row in rows.items()}
    assert found == {"import": ("ERROR", "unit", "pytest ended with 2:"), "minus": ("caught", "first", SEVEN[:20])}


def test_a_fault_whose_text_has_changed_is_refused(project: Path) -> None:
    with pytest.raises(InputError) as caught:
        replace(MINUS, old="a * b").seeded(project)
    assert caught.value.field == "minus"
