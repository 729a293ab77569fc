"""README, pages and code agree: their commands exist with the flags they give them; the demo does what it says."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from coordinator.cli.app import app
from worker.config import load_cluster

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in _PAGES)
TOP = typer.main.get_command(app)


def commands_in(text: str) -> list[str]:
    text = re.sub(r" *\\\n *", " ", text)  # a command on several lines
    in_blocks = re.findall(r"^ *(?:\w+=\S+ )*(brigade [a-z][^#\n]*?)(?:&|\d?>|#|$)", text, re.MULTILINE)
    in_text = re.findall(r"`(brigade [a-z][^`\n]*)`", text)
    return sorted({command.strip() for command in (*in_text, *in_blocks)})


def test_the_page_of_commands_shows_every_command() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    shown = {shlex.split(command)[1] for command in commands_in(page)}
    assert shown == set(TOP.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", commands_in(PAGES))
def test_commands_of_the_pages_exist_with_their_flags(command: str) -> None:
    found: Any = TOP
    arguments = shlex.split(command)[1:]
    while hasattr(found, "commands") and arguments:
        found = found.commands[arguments.pop(0)]
    known = {flag for parameter in found.params for flag in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("-")} <= known


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:coordinator|worker|tools|tests)/[\w/.]+)`", PAGES))))
def test_files_of_the_pages_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ((?:coordinator|worker|tools)[\w.]*)\b", PAGES))))
def test_modules_that_the_pages_run_exist(module: str) -> None:
    path = ROOT / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z]+)", PAGES))))
def test_make_targets_of_the_pages_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_readmes_cluster_file_is_one(tmp_path: Path) -> None:
    [example] = [each for each in re.findall(r"```yaml\n(.*?)```", README, re.DOTALL) if "workers:" in each]
    path = tmp_path / "cluster.yaml"
    path.write_text(textwrap.dedent(example), encoding="utf-8")
    assert [worker.name for worker in load_cluster(path).workers] == ["mini"]
    assert load_cluster(ROOT / "cluster.example.yaml").workers


def test_demo_answers_right_on_three_processes_and_leaves_none_behind(tmp_path: Path) -> None:
    mark = {"BRIGADE_TEST_MARK": str(tmp_path)}  # that its processes inherit, and nobody else's have
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "demo"],
        cwd=ROOT, env=os.environ | mark, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("Answer: 45")  # 48 + 27 - 30
    for said in (
        "coordinator",
        "worker-1",
        "worker-2",
        "tok/s",
        "ended by itself",
        "wall time",
        "busy: compute's share",
    ):
        assert said in done.stderr
    assert re.search(r"in windows +125 tokens in \d+ steps", done.stderr)
    assert re.search(r"one token per step 125 tokens in 125 steps, [\d.]+ tok/s: the same tokens", done.stderr)
    assert "Try next: " in done.stderr.splitlines()[-1]
    assert not [process for process in psutil.process_iter() if _has(process, mark)]


def _has(process: psutil.Process, mark: dict[str, str]) -> bool:
    with contextlib.suppress(psutil.Error):
        return mark.items() <= process.environ().items()
    return False


def test_an_older_python_gets_one_clear_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.6" && exit\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "tools/setup.sh"],
        cwd=ROOT,
        env={"PYTHON": str(old), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: expected Python 3.11 or newer, found Python 3.9.6; set PYTHON=/path/to/python3.11"
    ]


def test_both_pictures_of_two_macs_are_one_but_for_their_colours() -> None:
    light, dark = (
        re.sub(r"#\w{6}", "", (ROOT / "docs" / name).read_text()) for name in ("two_macs.svg", "two_macs_dark.svg")
    )
    assert light == dark and "<title>" in light
