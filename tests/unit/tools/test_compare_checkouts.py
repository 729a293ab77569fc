"""Two checkouts compared in turns: real processes, that print figures instead of measuring any."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tools.compare_checkouts import Comparison, compare, flat, in_turns, main, run_in
from worker.errors import BrigadeError, InputError

ROW = {"system": "cluster", "layers": [4, 4], "decode": "ar", "concurrency": 8, "tokens_per_s": 90.0}
SLOW = "import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])\n"


def checkout(folder: Path, program: str) -> Path:
    folder.mkdir()
    (folder / "figures.py").write_text(program)
    return folder


def printing(folder: Path, speed: float) -> Path:
    """Notes each run in a file beside the folder."""
    note = f"open('../runs', 'a').write('{folder.name} ')"
    return checkout(folder, f"{note}\nprint('loading')\nprint('{json.dumps({'tokens_per_s': speed})}')\n")


def test_a_figure_is_named_after_what_it_is_of_whatever_its_place() -> None:
    alone = {"system": "mlx_lm", "layers": None, "decode": "ar", "concurrency": 1, "tokens_per_s": 70}
    found = dict(flat({"rows": [ROW, alone], "ratio": 0.5, "fastest": [], "machine": "m", "ok": True, "no": None}))
    assert found["cluster 4,4 ar 8 at once.tokens_per_s"] == 90
    assert found["mlx_lm ar 1 at once.tokens_per_s"] == 70
    assert found["ratio"] == 0.5
    assert not {"machine", "ok", "no"} & found.keys()


def test_medians_and_ratios_are_of_what_both_printed_in_every_round() -> None:
    rounds = [({"a": 10.0, "b": 1.0}, {"a": 12.0}), ({"a": 20.0}, {"a": 18.0}), ({"a": 11.0}, {"a": 11.0, "c": 1.0})]
    assert compare(rounds, ".") == [Comparison("a", 11.0, 12.0, [1.2, 0.9, 1.0])]
    assert compare(rounds, "x") == []
    [zero] = compare([({"a": 0.0}, {"a": 2.0})], "a")
    assert zero.ratio is None and zero.ratios == []


def test_checkouts_take_turns_each_in_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(printing(tmp_path / "old", 80.0), printing(tmp_path / "new", 100.0), ["-m", "figures"], rounds=3, minutes=1.0)
    assert (tmp_path / "runs").read_text().split() == ["old", "new", "new", "old", "old", "new"]
    [row] = [line for line in capsys.readouterr().out.splitlines() if "tokens_per_s" in line]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["tokens_per_s", "80", "100", *["1.250"] * 3]


def test_what_is_not_done_in_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "slow", SLOW)
    before = time.monotonic()
    assert run_in(folder, ["-m", "figures"], 1.0) is None
    assert time.monotonic() - before < 30
    mine = psutil.Process(os.getpid()).children(recursive=True)
    assert not [child for child in mine if child.status() != psutil.STATUS_ZOMBIE and child.cwd() == str(folder)]
    assert list(in_turns(folder, folder, ["-m", "figures"], 5, time.monotonic())) == []


def test_a_comparison_that_is_ended_ends_its_command(tmp_path: Path) -> None:
    told = "open('pid', 'w').write(str(os.getpid()))\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n"
    folder = checkout(tmp_path / "slow", f"import os, signal, time\n{told}")
    command = [sys.executable, "-m", "tools.compare_checkouts", str(folder), str(folder), "--", "-m", "figures"]
    assert subprocess.run(command, capture_output=True).returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int((folder / "pid").read_text()))


def test_a_checkout_that_fails_or_is_missing_and_too_little_time_are_refused(tmp_path: Path) -> None:
    for number, (program, said) in enumerate((
        ("import sys; sys.exit('no such flag')", r"python -m figures ended with 1:\nno such flag"),
        ("print('fast')", "expected a JSON object as the last line, found 'fast"),
    )):  # fmt: skip
        with pytest.raises(BrigadeError, match=said):
            run_in(checkout(tmp_path / str(number), program), ["-m", "figures"], 30.0)
    folder = printing(tmp_path / "old", 1.0)
    with pytest.raises(InputError, match=r"expected a checkout's folder, found none at .*nowhere"):
        main(folder, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"^minutes: expected enough for a run of each"):
        main(folder, folder, ["-c", "import time; time.sleep(60)"], minutes=0.005)
