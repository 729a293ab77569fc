"""Progress of loading: labelled phases on a terminal, elsewhere a line for what takes long."""

import asyncio
import io
import re

import pytest
from rich.console import Console

from coordinator.cluster import progress as progress_module
from coordinator.cluster.progress import ASKING, STARTING, show_progress
from protos.brigade_pb2 import LoadProgress
from tests.unit.virtual_time import VirtualTime

MIB = 2**20


def load(done: int, total: int = 3 * MIB, phase: str = "load") -> LoadProgress:
    return LoadProgress(phase=phase, done=done, total=total)


@pytest.mark.parametrize(
    ("phase_s", "said"), [(0.9, ""), (2.1, "mini: load 3.0 MiB ...\nall nodes: warm-up ...\n")], ids=["short", "long"]
)
def test_where_nobody_watches_only_long_work_is_a_line_per_phase(
    virtual: VirtualTime, capsys: pytest.CaptureFixture[str], phase_s: float, said: str
) -> None:
    async def show() -> None:
        with show_progress() as report:
            report("", STARTING)
            report("", ASKING)
            report("mini", load(0))
            report("air", load(MIB, MIB, "kept"))
            await asyncio.sleep(phase_s)
            report("mini", load(MIB))
            report("", LoadProgress(phase="warm-up", total=6))
            await asyncio.sleep(phase_s)
        await asyncio.sleep(60)

    virtual.run(show())
    assert capsys.readouterr() == ("", said)


def test_without_a_terminal_a_feed_tells_its_speed(virtual: VirtualTime, capsys: pytest.CaptureFixture[str]) -> None:
    async def show() -> None:
        with show_progress() as report:
            report("mini", load(0, phase="feed"))
            await asyncio.sleep(3)
            report("mini", load(MIB, phase="feed"))
            await asyncio.sleep(40)
            report("mini", load(3 * MIB, phase="load"))  # no line of the other phase any more
            await asyncio.sleep(30)

    virtual.run(show())
    assert capsys.readouterr().err.splitlines() == [
        "mini: feed 3.0 MiB ...",
        "mini: feed 3.0 MiB, 46.5 KiB/s, 0:00:44 left ...",
        "mini: feed 3.0 MiB, 24.4 KiB/s, 0:01:24 left ...",
        "mini: load 3.0 MiB ...",
    ]


def test_a_worker_may_tell_of_any_size(virtual: VirtualTime, capsys: pytest.CaptureFixture[str]) -> None:
    async def show() -> None:
        with show_progress() as report:
            report("mini", load(1, 2**64 - 1, "feed"))
            await asyncio.sleep(3)

    virtual.run(show())
    assert re.fullmatch(r"mini: feed .*, 0 B/s, \d+ days, .* left \.\.\.\n", capsys.readouterr().err)


def test_a_terminal_shows_every_phase_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        progress_module,
        "plain_console",
        lambda **_: Console(file=screen, force_terminal=True, width=100, color_system=None),
    )
    steps = [
        ("", STARTING, "all nodes    starting workers"),
        ("", ASKING, "all nodes    asking nodes"),
        ("mini", load(MIB, phase="download"), "mini         download .* 1.0 MiB of 3.0 MiB"),
        ("mini", load(2 * MIB), "mini         load .* 2.0 MiB of 3.0 MiB"),
        ("air", load(MIB, MIB, "kept"), "air          kept .* 1.0 MiB of 1.0 MiB"),
        ("", LoadProgress(phase="warm-up", done=2, total=6), "all nodes    warm-up .* 2 of 6"),
    ]
    with show_progress() as report:
        for node, progress, row in steps:
            screen.truncate(screen.seek(0))
            report(node, progress)
            assert re.search(row, screen.getvalue())
        screen.truncate(screen.seek(0))  # a thread may have painted the rows before the last report once more
    assert re.search(steps[-1][-1], screen.getvalue())
    assert "load" not in screen.getvalue(), "once all nodes warm up, none of them loads"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_each_node_has_one_line_on_a_terminal_of_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(progress_module, "plain_console", lambda **_: console)
    nodes = ("coordinator", "mini", "air")
    with show_progress() as report:
        for done in (0, 1, 2):
            for node in nodes:
                screen.truncate(screen.seek(0))
                report(node, load(done * MIB))
        screen.truncate(screen.seek(0))
    rows = re.findall(r"\w.*", re.sub(r"\x1b\[\S*?[A-Za-z]", "\n", screen.getvalue()))
    assert {row.split()[0] for row in rows} == {*nodes}
    assert all("load" in row and "━" in row and len(row) <= width for row in rows)
    assert ("2.0 MiB of 3.0 MiB" in screen.getvalue()) == (width >= 80)


def test_token_lines_get_less_frequent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    with progress_module.show_tokens("scored", 60, done=10) as report:
        for _ in range(50):
            now += 1.0
            report(1, 20)
    said = [f"scored {done} of 60, 20 tok/s, 0:00:{60 - done} left ..." for done in (15, 20, 30, 50)]
    assert capsys.readouterr().err.splitlines() == said
    with progress_module.show_tokens("answered", 80) as report:  # many at once, of which the first ends after 20 s
        for second in range(1, 45):
            now += 1.0
            report(2 * (second >= 20), 50)
    said = ["0 of 80, 50 tok/s", "0 of 80, 50 tok/s", "2 of 80, 50 tok/s", "42 of 80, 50 tok/s, 0:00:36 left"]
    assert capsys.readouterr().err.splitlines() == [f"answered {line} ..." for line in said]
    with progress_module.show_tokens("scored", 5) as report:
        report(5, 5)
    assert capsys.readouterr().err == ""
