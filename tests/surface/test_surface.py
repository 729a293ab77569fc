"""The surface that users and programs rely on is as recorded, but for the changes that intended.txt lists."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from os import environ
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GROUPS = (("served",), ("flags", "exits", "printed", "lines", "kinds"))  # a process each
SECTIONS = [section for group in GROUPS for section in group]
LIMIT_S = 900.0
BLOCKS = [block.splitlines() for block in (HERE / "intended.txt").read_text(encoding="utf-8").split("\n\n")[1:]]

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Path]]]:
    """By section of the selected tests, the folder that the present surface is in; two processes record it."""
    names = {item.name for item in request.session.items}
    folder = tmp_path_factory.mktemp("surface")

    def record(*sections: str) -> Path:
        done = subprocess.run(
            [sys.executable, HERE / "record.py", folder, *sections],
            env=environ | {"PYTHONPATH": f"{ROOT}:{environ.get('PYTHONPATH', '')}"},
            capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"{' '.join(sections)} of {ROOT}:" in done.stderr, done.stderr
        return folder

    with ThreadPoolExecutor(len(GROUPS)) as pool:
        found = {}
        for group in GROUPS:
            if sections := [each for each in group if any(f"[{each}]" in name for name in names)]:
                found |= dict.fromkeys(sections, pool.submit(record, *sections))
        yield found


def lines_of(folder: Path, section: str) -> set[str]:
    return set((folder / f"{section}.txt").read_text(encoding="utf-8").splitlines())


def differences(found: set[str], recorded: set[str], gone: set[str], come: set[str]) -> list[str]:
    """Lines that are missing or new against the record with its intended changes; changes that change nothing."""
    expected = (recorded - gone) | come
    missing, new, idle = expected - found, found - expected, (gone - recorded) | (come & recorded)
    return [f"{sign} {line}" for sign, lines in (("-", missing), ("+", new), ("?", idle)) for line in sorted(lines)]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_surface_is_as_it_was_recorded(section: str, found: dict[str, Future[Path]]) -> None:
    lines = [line for title, *lines in BLOCKS if title.partition(":")[0] == section for line in lines]
    gone, come = ({line[2:] for line in lines if line[:2] == sign} for sign in ("- ", "+ "))
    told = differences(
        lines_of(found[section].result(), section), lines_of(HERE / "recorded", section), gone, come
    )  # fmt: skip
    assert not told, "\n".join(["the surface has changed (tests/surface/intended.txt lists intended changes):", *told])


def test_every_record_is_compared_and_an_unintended_difference_is_reported() -> None:
    assert {path.stem for path in (HERE / "recorded").iterdir()} == set(SECTIONS)
    for title, *lines in BLOCKS:
        assert title.partition(": ")[0] in SECTIONS and lines and all(line[:2] in ("- ", "+ ") for line in lines)
    recorded, found = {"plan --json: bool"}, {"plan --jsno: bool"}
    assert differences(found, recorded, set(), set()) == ["- plan --json: bool", "+ plan --jsno: bool"]
    assert differences(found, recorded, recorded, found) == []
    idle = differences(recorded, recorded, {"plan --yaml: bool"}, recorded)
    assert idle == ["? plan --json: bool", "? plan --yaml: bool"]
