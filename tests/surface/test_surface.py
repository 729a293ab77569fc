"""The surface that users and programs rely on is as recorded, but for the changes that intended.txt lists."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = HERE / "recorded"
Recorded = dict[str, Future[Path]]  # by section, the folder it is in
GROUPS = (("served",), ("flags", "exits", "printed", "lines", "kinds"))  # a process each
SECTIONS = [section for group in GROUPS for section in group]
LIMIT_S = 900.0

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """The present surface by section, of the selected tests; two processes record it at a time."""
    names = {item.name for item in request.session.items}
    folder = tmp_path_factory.mktemp("surface")
    pool = ThreadPoolExecutor(len(GROUPS))
    try:
        found: Recorded = {}
        for group in GROUPS:
            if sections := [each for each in group if any(f"[{each}]" in name for name in names)]:
                found |= dict.fromkeys(sections, pool.submit(record, folder, sections))
        yield found
    finally:
        pool.shutdown(cancel_futures=True)


def record(folder: Path, sections: Sequence[str]) -> Path:
    """Record sections of this checkout in a folder; return it."""
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, HERE / "record.py", folder, *sections],
        env=os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{' '.join(sections)} of {ROOT}:" in done.stderr, done.stderr
    return folder


def lines_of(section: str, folder: Path) -> set[str]:
    return set((folder / f"{section}.txt").read_text(encoding="utf-8").splitlines())


def intended(section: str) -> tuple[set[str], set[str]]:
    """The lines of a section that go and that come, by intended.txt."""
    gone, come = set(), set()
    for block in (HERE / "intended.txt").read_text(encoding="utf-8").split("\n\n"):
        title, *lines = block.splitlines()
        if title.partition(":")[0] == section:
            gone |= {line.removeprefix("- ") for line in lines if line.startswith("- ")}
            come |= {line.removeprefix("+ ") for line in lines if line.startswith("+ ")}
    return gone, come


def differences(found: set[str], recorded: set[str], gone: set[str], come: set[str]) -> list[str]:
    """Lines that are missing or new against the record with its intended changes; changes that change nothing."""
    expected = (recorded - gone) | come
    missing, new, idle = expected - found, found - expected, (gone - recorded) | (come & recorded)
    return [f"{sign} {line}" for sign, lines in (("-", missing), ("+", new), ("?", idle)) for line in sorted(lines)]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_surface_is_as_it_was_recorded(section: str, found: Recorded) -> None:
    told = differences(lines_of(section, found[section].result()), lines_of(section, RECORDED), *intended(section))
    assert not told, "\n".join(["the surface has changed (tests/surface/intended.txt lists intended changes):", *told])


def test_every_record_is_compared() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(SECTIONS)


def test_intended_changes_are_of_known_sections() -> None:
    _, *blocks = (HERE / "intended.txt").read_text(encoding="utf-8").split("\n\n")
    for title, *lines in map(str.splitlines, blocks):
        assert title.partition(": ")[0] in SECTIONS and lines and all(line[:2] in ("- ", "+ ") for line in lines)


def test_an_unintended_difference_is_reported() -> None:
    recorded, found = {"plan --json: bool"}, {"plan --jsno: bool"}
    assert differences(found, recorded, set(), set()) == ["- plan --json: bool", "+ plan --jsno: bool"]
    assert differences(found, recorded, recorded, found) == []
    idle = differences(recorded, recorded, {"plan --yaml: bool"}, recorded)
    assert idle == ["? plan --json: bool", "? plan --yaml: bool"]
