"""The rules that the whole tree keeps, read from its syntax trees. Each checker is tried on a bad example first."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "worker", "coordinator", "tools")  # each may import itself and what stands left of it
MAX_LINES = 350
PURE = (
    *("answer", "costs", "decode", "decoders", "lengths", "plan", "request", "scheduler"),
    *("session", "simulate", "slots", "trace", "waterfall", "window"),
)
WORLDLY = {"grpc", "asyncio", "mlx", "time", "socket"}
CATCH_ALL = {"worker/service.py", "worker/run.py", "worker/call_thread.py"}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "torch"}
BANNED_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
RUNS_OUR_OWN_TEXT = {"tools/demo_data/functions.py"}  # it makes training examples from functions.toml beside it

_ABSOLUTE = re.compile(r"^(?:/(?:home|Users|root|tmp|var|work|opt|mnt|etc|usr|private|Volumes)(?:/|$)|[A-Za-z]:\\)")

Checker = Callable[[str, ast.Module], Iterator[str]]


def imports_only_leftwards(path: str, tree: ast.Module) -> Iterator[str]:
    package = path.split("/")[0]
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    for line, module in _imports(path, tree):
        root = module.split(".")[0]
        if root == "tests" or (root in PACKAGES and root not in allowed):
            yield f"{path}:{line} imports {module}"


def pure_modules_know_no_world(path: str, tree: ast.Module) -> Iterator[str]:
    if path not in {f"coordinator/{name}.py" for name in PURE}:
        return
    for line, module in _imports(path, tree):
        if module.split(".")[0] in WORLDLY:
            yield f"{path}:{line} imports {module}"


def nothing_loads_code_from_data(path: str, tree: ast.Module) -> Iterator[str]:
    for line, module in _imports(path, tree):
        if module.split(".")[0] in BANNED_MODULES:
            yield f"{path}:{line} imports {module}"
    if path in RUNS_OUR_OWN_TEXT:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in BANNED_CALLS:
            yield f"{path}:{node.lineno} calls {ast.unparse(node.func)}"


def only_three_places_catch_anything(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        broad = isinstance(node, ast.ExceptHandler) and (
            node.type is None
            or any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in ast.walk(node.type))
        )
        suppressed = isinstance(node, ast.Call) and re.search(
            r"\bsuppress\(.*\b(Base)?Exception\b", ast.unparse(node)
        )  # the same thing by another name
        if (broad or suppressed) and path not in CATCH_ALL:
            yield f"{path}:{node.lineno} catches anything"  # type: ignore[attr-defined]


def no_path_is_absolute(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _ABSOLUTE.match(node.value):
            yield f"{path}:{node.lineno} names {node.value!r}"


def every_module_says_what_it_is(path: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield f"{path} has no docstring"


def _imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every imported module with its line, also inside functions and type-checking blocks; relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, module
            if module == "":
                yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            literal = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, module) for module in literal)


CHECKERS: tuple[Checker, ...] = (
    imports_only_leftwards,
    pure_modules_know_no_world,
    nothing_loads_code_from_data,
    only_three_places_catch_anything,
    no_path_is_absolute,
    every_module_says_what_it_is,
)


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


FILES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "__pycache__" not in path.parts
]
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
WRITTEN = {name: tree for name, tree in TREES.items() if not is_generated(Path(name))}


def test_the_whole_tree_is_read() -> None:
    assert {name.split("/")[0] for name in TREES} == set(PACKAGES)
    assert set(CATCH_ALL) | {f"coordinator/{name}.py" for name in PURE} <= set(TREES)


def test_generated_code_imports_only_leftwards() -> None:
    found = [problem for name in TREES.keys() - WRITTEN.keys() for problem in imports_only_leftwards(name, TREES[name])]
    assert not found


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_tree_keeps_the_rule(checker: Checker) -> None:
    assert not [problem for name, tree in WRITTEN.items() for problem in checker(name, tree)]


def test_no_file_is_longer_than_350_lines() -> None:
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in WRITTEN}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


@pytest.mark.parametrize(
    ("checker", "path", "source"),
    [
        (imports_only_leftwards, "worker/x.py", "import coordinator.plan"),
        (imports_only_leftwards, "worker/x.py", "from coordinator import plan"),
        (imports_only_leftwards, "worker/x.py", "def f():\n    from tools.train_demo import main"),
        (imports_only_leftwards, "worker/x.py", "from ..coordinator import plan"),
        (imports_only_leftwards, "worker/x.py", "from .. import coordinator"),
        (imports_only_leftwards, "worker/x.py", "import importlib\nimportlib.import_module('coordinator.plan')"),
        (imports_only_leftwards, "protos/x.py", "import worker"),
        (imports_only_leftwards, "coordinator/x.py", "import tools"),
        (imports_only_leftwards, "tools/x.py", "from tests.tiny import make_model"),
        (pure_modules_know_no_world, "coordinator/plan.py", "import mlx.core as mx"),
        (pure_modules_know_no_world, "coordinator/session.py", "from time import monotonic"),
        (pure_modules_know_no_world, "coordinator/trace.py", "def f():\n    import asyncio"),
        (nothing_loads_code_from_data, "tools/x.py", "import pickle"),
        (nothing_loads_code_from_data, "tools/x.py", "from torch import nn"),
        (nothing_loads_code_from_data, "tools/x.py", "eval('1')"),
        (nothing_loads_code_from_data, "tools/x.py", "import yaml\nyaml.load(text)"),
        (nothing_loads_code_from_data, "tools/demo_data/functions.py", "import pickle"),
        (only_three_places_catch_anything, "worker/x.py", "try:\n    f()\nexcept Exception:\n    pass"),
        (only_three_places_catch_anything, "worker/x.py", "try:\n    f()\nexcept:\n    pass"),
        (only_three_places_catch_anything, "worker/x.py", "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
        (only_three_places_catch_anything, "worker/x.py", "with contextlib.suppress(Exception):\n    f()"),
        (no_path_is_absolute, "worker/x.py", "folder = '/home/me/models'"),
        (no_path_is_absolute, "worker/x.py", "folder = '/tmp'"),
        (every_module_says_what_it_is, "worker/x.py", "x = 1"),
    ],
)
def test_a_breach_is_found(checker: Checker, path: str, source: str) -> None:
    assert list(checker(path, ast.parse(source)))


@pytest.mark.parametrize(
    ("checker", "path", "source"),
    [
        (imports_only_leftwards, "coordinator/x.py", "import worker.wire\nfrom protos import brigade_pb2\nimport os"),
        (imports_only_leftwards, "worker/x.py", "from .wire import to_array"),
        (pure_modules_know_no_world, "coordinator/chain.py", "import asyncio"),
        (nothing_loads_code_from_data, "worker/x.py", "import yaml\nmx.eval(a)\nmodel.eval()\nyaml.safe_load(text)"),
        (only_three_places_catch_anything, "worker/service.py", "try:\n    f()\nexcept Exception:\n    pass"),
        (only_three_places_catch_anything, "worker/x.py", "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
        (no_path_is_absolute, "worker/x.py", "a = '/'\nb = '/v1/models'\nc = 'home/me'"),
    ],
)
def test_what_is_allowed_passes(checker: Checker, path: str, source: str) -> None:
    assert not list(checker(path, ast.parse(source)))
