"""What users and programs rely on is as it was recorded, but for the changes that `intended.py` lists."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.surface.intended import CHANGES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = HERE / "recorded"
SECTIONS = (
    "exits",
    "printed",
    "served",
    "signals",
    "lines",
    "kinds",
    "flags",
    "environment",
)  # what takes longest first
LIMIT_S = 900.0

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Future[set[str]]]]:
    """The surface as it is, by section; two are looked at side by side."""
    with ThreadPoolExecutor(2) as pool:
        yield {section: pool.submit(look, section) for section in SECTIONS}


def look(section: str) -> set[str]:
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, HERE / "record.py", section],
        env=os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{section} of {ROOT}:" in done.stderr, done.stderr
    return set(done.stdout.splitlines())


def differences(section: str, recorded: set[str], found: set[str]) -> list[str]:
    """Lines that are gone or new, and in no intended change; changes that were made and are not to be seen."""
    told = []
    changes = [change for change in CHANGES if change.section == section]
    seen = set()
    for sign, lines, name in (("-", recorded - found, "gone"), ("+", found - recorded, "come")):
        for line in sorted(lines):
            allowing = {
                change for change in changes if any(re.fullmatch(pattern, line) for pattern in getattr(change, name))
            }
            seen |= allowing
            if not allowing:
                told.append(f"{sign} {line}")
    return told + [f"? {change.what}" for change in changes if change not in seen and not change.may_come]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_surface_is_as_it_was_recorded(section: str, found: dict[str, Future[set[str]]]) -> None:
    recorded = set((RECORDED / f"{section}.txt").read_text(encoding="utf-8").splitlines())
    told = differences(section, recorded, found[section].result())
    assert not told, "\n".join(["the surface has changed (tests/surface/intended.py lists what is meant):", *told])


def test_every_record_is_compared() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(SECTIONS)


def test_a_difference_that_is_not_meant_is_told() -> None:
    assert differences("flags", {"brigade plan --json: bool"}, {"brigade plan --jsno: bool"}) == [
        "- brigade plan --json: bool",
        "+ brigade plan --jsno: bool",
    ]
