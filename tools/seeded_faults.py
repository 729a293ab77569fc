"""Seed one fault at a time in a copy of the tree and report which test catches it.

python -m tools.seeded_faults [--only AREA_OR_NAME ...] [--jobs N] [--json FILE] [--first FILE] [--list]

The faults are in tools/seeded_faults/, a file per area. Tests run in three stages, each to its first failure and by the
number of imports between a test file and the changed module: unit test files that import it (directly or through
helpers), integration tests, other unit tests. With --first, the test that caught a fault in an earlier run is tried
before them, or its file if it is gone. A run of tests that ends with neither success nor a failed test proves nothing:
the fault is an ERROR. In the end the catching tests run without a fault: what fails is UNSURE.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from tools.figures import table
from worker.errors import InputError
from worker.platform.run import run_command

ROOT = Path(__file__).parents[1]
FAULTS = Path(__file__).with_suffix("")
OWN_TEST = "tests.unit.tools.test_seeded_faults"  # fails for every fault, because the old text is gone
STAGES = {"first": 120.0, "unit": 120.0, "integration": 180.0, "rest": 180.0}  # the most seconds of each
_TEST_S = 60  # that one test may take: it is "hung" then
_PYTEST = ("-x", "-v", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--tb=no", "-rfE", "--timeout-method=thread")


@dataclass(frozen=True)
class Fault:
    area: str
    name: str
    rule: str  # that the fault breaks
    file: str
    old: str  # occurs once in the file
    new: str

    def seeded(self, root: Path) -> str:
        """Return the faulty text of the file. Raises InputError if the code has moved on."""
        source = (root / self.file).read_text()
        if (count := source.count(self.old)) != 1:
            raise InputError(self.name, f"expected its old text once in {self.file}, found it {count} times")
        return source.replace(self.old, self.new)


def load(folder: Path) -> list[Fault]:
    """Return the faults of every TOML file in a folder; a file's stem is the area."""
    files = [(path.stem, tomllib.loads(path.read_text())) for path in sorted(folder.glob("*.toml"))]
    return [Fault(area=area, **entry) for area, content in files for entry in content["fault"]]


def choose_tests(root: Path, file: str) -> dict[str, list[str]]:
    """Return the test files of each stage for a changed file, those with the fewest imports in between first."""
    imports = imports_of(root)
    steps = {file.removesuffix(".py").replace("/", "."): 0}
    while more := {name for name, found in imports.items() if name not in steps and not found.isdisjoint(steps)}:
        steps |= dict.fromkeys(more, max(steps.values()) + 1)
    stem = Path(file).stem  # namesakes first, then those that import least
    tests = sorted(name for name in imports if ".test_" in name and name != OWN_TEST)
    tests.sort(key=lambda test: (steps.get(test, 99), stem not in test.rpartition(".")[2], len(imports[test])))
    unit, integration = ([name for name in tests if f".{kind}." in name] for kind in ("unit", "integration"))
    near, far = ([name for name in unit if (steps.get(name) == 1) is is_near] for is_near in (True, False))
    by_stage = {"unit": near, "integration": integration, "rest": far}
    return {stage: [f"{name.replace('.', '/')}.py" for name in found] for stage, found in by_stage.items()}


@cache
def imports_of(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module imports; a test also imports what its helpers in tests/ do."""
    imports: dict[str, set[str]] = {}
    for path in (path for package in ("coordinator", "worker", "tests") for path in (root / package).rglob("*.py")):
        found = imports[".".join(path.relative_to(root).with_suffix("").parts)] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for found in (imports[name] for name in imports if ".test_" in name):
        waiting = [name for name in found if name.startswith("tests.")]
        for helper in waiting:  # grows
            waiting += [name for name in imports.get(helper, set()) - found if name.startswith("tests.")]
            found |= imports.get(helper, set())
    return imports


def copy_tree(root: Path, copy: Path) -> Path:
    """Copy a checkout. Raises InputError unless Python imports the copy there."""
    shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", ".*cache"))
    command = [sys.executable, "-c", "print(__import__('coordinator').__file__)"]
    found = subprocess.run(command, cwd=copy, env=_environment(copy), capture_output=True, text=True).stdout.strip()
    if not Path(found or "/").is_relative_to(copy):
        raise InputError("", f"expected Python to import coordinator from {copy}, it imports {found or 'none'}")
    return copy


def run_tests(copy: Path, tests: Sequence[str], limit_s: float, *options: str) -> tuple[str, list[str]]:
    """Run tests in a copy.

    Returns:
        "passed", "caught", "hung" or "too slow", and the tests that failed or hung; or "error", where pytest ended
        without a result (a test that does not exist, a file that cannot be imported, a crash), and how it ended.
    """
    command = [sys.executable, "-u", "-m", "pytest", *_PYTEST, f"--timeout={_TEST_S}", *options, *tests]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=copy, env=_environment(copy), start_new_session=True, **streams) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "too slow", []
        finally:
            with suppress(ProcessLookupError):  # ends what the tests started, too
                os.killpg(process.pid, signal.SIGKILL)
    if "+ Timeout +" in output:
        return "hung", re.findall(r"^(tests/\S+::\S+)", output, re.MULTILINE)[-1:]
    if process.returncode in (0, 5):  # 5: every test is deselected by its mark
        return "passed", []
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    if process.returncode == 1 and failed:
        return "caught", failed
    return "error", [f"pytest ended with {process.returncode}: {output[-300:]}"]


def _environment(copy: Path) -> dict[str, str]:
    """Return what a test process needs. Plugins of pytest that no test uses would take most of its start.

    No bytecode: that of a file with another fault of the same length and second would count as up to date.
    """
    own = {"PYTHONPATH": str(copy), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **own, "COLUMNS": "400", "PYTHONIOENCODING": "utf-8:replace"}


def measure(
    root: Path, faults: Sequence[Fault], jobs: int, rows: dict[str, dict[str, Any]], first: Mapping[str, str] = {}
) -> Iterator[str]:
    """Run every fault until a test catches it; keep its row in `rows` by name, and yield a line after each run.

    Args:
        first: by the name of a fault, the test that is tried first; its file if there is no such test any more.
    """
    new = {"result": "MISSED", "stage": "", "test": "", "seconds": 0.0, "too_slow": ""}  # too_slow: a stage cut short
    rows.update({fault.name: asdict(fault) | new for fault in faults})
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool, ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)
        copies = [copy_tree(root, Path(folder).resolve() / str(job)) for job in range(jobs)]

        def try_stage(fault: Fault, stage: str) -> None:
            copy, row, began = copies.pop(), rows[fault.name], time.monotonic()
            path, source = copy / fault.file, (copy / fault.file).read_text()
            try:
                path.write_text(fault.seeded(copy))
                chosen = [first[fault.name]] if stage == "first" else choose_tests(copy, fault.file)[stage]
                verdict, tests = run_tests(copy, chosen, STAGES[stage]) if chosen else ("passed", [])
                if stage == "first" and verdict == "error":  # the test has another name now
                    verdict, tests = run_tests(copy, [chosen[0].partition("::")[0]], STAGES[stage])
            finally:
                path.write_text(source)
                copies.append(copy)
            row["seconds"] = round(row["seconds"] + time.monotonic() - began, 1)
            row["too_slow"] += f"{stage} " * (verdict == "too slow")
            if verdict in ("caught", "hung") or (verdict == "error" and stage != "first"):
                result = "ERROR" if verdict == "error" else verdict
                row.update(result=result, stage=stage, test=next(iter(tests), ""))

        for stage in STAGES:
            left = [fault for fault in faults if rows[fault.name]["result"] in ("MISSED", "ERROR")]
            if stage == "first":
                left = [fault for fault in left if fault.name in first]
            for done, (fault, run) in enumerate([(fault, pool.submit(try_stage, fault, stage)) for fault in left], 1):
                run.result()
                row = rows[fault.name]
                yield f"{stage} {done}/{len(left)} {fault.name}: {row['result']} {row['test']} {row['seconds']} s"
        caught = [row for row in (rows[fault.name] for fault in faults) if row["result"] in ("caught", "hung")]
        tests = sorted({row["test"] for row in caught})
        verdict, failing = (
            run_tests(copies.pop(), tests, _TEST_S * len(tests), "--maxfail=0") if tests else ("passed", [])
        )
        for row in caught:
            if row["test"] in failing or verdict not in ("passed", "caught"):
                row["result"] = "UNSURE"
                yield f"without a fault {row['test']} is {verdict}: {row['name']} is UNSURE"


def main(
    only: Annotated[list[str] | None, typer.Option(help="Areas or names of faults. (default: all)")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Faults that are tried at once.")] = 1,
    output: Annotated[Path | None, typer.Option("--json", help="A row per fault; rows of others stay.")] = None,
    earlier: Annotated[Path | None, typer.Option("--first", help="The JSON of an earlier run.")] = None,
    is_listing: Annotated[bool, typer.Option("--list", help="List the faults and run none.")] = False,
) -> None:
    """Seed faults and report which test catches each."""
    faults = [fault for fault in load(FAULTS) if not only or {fault.area, fault.name} & set(only)]
    if not faults:
        raise InputError("only", f"expected areas or names of faults, got {', '.join(only or ())}")
    rows = {fault.name: asdict(fault) | {"result": "fit"} for fault in faults if fault.seeded(ROOT)}  # or it raises
    if not is_listing:
        rows = {row["name"]: row for row in json.loads(output.read_text())} if output and output.exists() else {}
        first = {row["name"]: row["test"] for row in json.loads(earlier.read_text())} if earlier else {}
        first = {name: test for name, test in first.items() if "::" in test}
        for line in measure(ROOT, faults, jobs, rows, first):
            print(line, flush=True)
            if output:
                output.write_text(json.dumps(list(rows.values()), indent=1))
    columns = ("area", "name", "rule", "file") if is_listing else ("area", "name", "result", "test", "seconds")
    print(table(columns, [[str(rows[fault.name][column]) for column in columns] for fault in faults]))
    found = [rows[fault.name] for fault in faults]
    print(f"{len(faults)} faults: {dict(Counter(row['result'] for row in found))}")
    if not is_listing:
        tiers = Counter(row["test"].split("/")[1] for row in found if row["result"] in ("caught", "hung"))
        print(f"by the folder of the test: {dict(tiers)}")


if __name__ == "__main__":
    run_command(main)
