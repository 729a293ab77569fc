"""README and pages name commands, flags, files and links that exist; the demo and the set-up script work as written."""

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
PAGES = {page: page.read_text(encoding="utf-8") for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
TEXT = "\n".join(PAGES.values())
TOP = typer.main.get_command(app)


def commands_in(text: str) -> list[str]:
    text = re.sub(r" *\\\n *", " ", text)  # a command on several lines
    in_blocks = re.findall(r"^ *(?:\w+=\S+ )*(brigade [a-z][^#\n]*?)(?:&|\d?>|#|$)", text, re.MULTILINE)
    in_text = re.findall(r"`(brigade [a-z][^`\n]*)`", text)
    return sorted({command.strip() for command in (*in_text, *in_blocks)})


def test_commands_of_the_pages_exist_with_their_flags() -> None:
    for command in commands_in(TEXT):
        found: Any = TOP
        arguments = shlex.split(command)[1:]
        while hasattr(found, "commands") and arguments:
            assert arguments[0] in found.commands, command
            found = found.commands[arguments.pop(0)]
        known = {flag for parameter in found.params for flag in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("-")} <= known, command


def test_the_page_of_commands_shows_every_command() -> None:
    shown = {shlex.split(command)[1] for command in commands_in(PAGES[ROOT / "docs/commands.md"])}
    assert shown == set(TOP.commands)  # type: ignore[attr-defined]


def test_files_modules_and_make_targets_of_the_pages_exist() -> None:
    for path in set(re.findall(r"`((?:coordinator|worker|tools|tests)/[\w/.]+)`", TEXT)):
        assert (ROOT / path).exists(), path
    for module in set(re.findall(r"python -m ((?:coordinator|worker|tools)[\w.]*)\b", TEXT)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z]+)", TEXT)) <= set(targets)


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def anchors(page: Path) -> list[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", PAGES[page], re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readmes_cluster_file_and_the_example_load(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGES[ROOT / "README.md"], re.DOTALL)
    [example] = [each for each in examples if "workers:" in each]
    path = tmp_path / "cluster.yaml"
    path.write_text(textwrap.dedent(example), encoding="utf-8")
    assert [worker.name for worker in load_cluster(path).workers] == ["mini"]
    assert load_cluster(ROOT / "cluster.example.yaml").workers


def test_the_demo_answers_right_on_three_processes_and_leaves_none_behind(tmp_path: Path) -> None:
    mark = {"BRIGADE_TEST_MARK": str(tmp_path)}  # inherited by the processes of this demo only
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "demo"],
        cwd=ROOT, env=os.environ | mark, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("Answer: 45")  # 48 + 27 - 30
    assert all(node in done.stderr for node in ("coordinator", "worker-1", "worker-2"))
    assert re.search(r"in windows +125 tokens in \d+ steps", done.stderr)
    assert re.search(r"one token per step 125 tokens in 125 steps, [\d.]+ tok/s: the same tokens", done.stderr)
    assert not [process for process in psutil.process_iter() if has(process, mark)]


def has(process: psutil.Process, mark: dict[str, str]) -> bool:
    with contextlib.suppress(psutil.Error):
        return mark.items() <= process.environ().items()
    return False


def test_an_older_python_gets_one_line_with_what_to_set(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.6" && exit\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["bash", "tools/setup.sh"],
        cwd=ROOT, env={"PYTHON": str(old), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: expected .*3\.11.*found Python 3\.9\.6.*PYTHON=.*\n", done.stderr)
