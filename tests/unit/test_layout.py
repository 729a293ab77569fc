"""The rules that the whole tree keeps, read from its syntax trees. Each checker is tried on a bad example first."""

import ast
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "worker", "coordinator", "tools")  # each may import itself and what stands left of it
# Likewise for the rooms of a package; what stands beside the rooms (errors, config) may be imported by all of them.
ROOMS = {
    "worker": ("platform", "model", "memory", "compute", "node"),
    "coordinator": (
        "planning",
        "decoding",
        "sessions",
        "cluster",
        "engine",
        "api",
        "deploy",
        "bench",
        "quality",
        "cli",
    ),
}
BESIDE_ROOMS = {"worker.errors", "worker.config"}
PURE_ROOMS = ("planning", "decoding", "sessions")
ALSO_PURE = {
    *(
        "coordinator.bench.simulate",
        "coordinator.cli.trace",
        "worker.compute.header",
        "worker.node.framing",
    ),
    *(f"coordinator.deploy.{name}" for name in ("checks", "findings", "install")),
}
WORLDLY = {"grpc", "asyncio", "mlx", "mlx_lm", "time", "socket", "uvloop"}
# what finds and reads checkpoints: what comes of it, ModelSpec, is plain numbers
CHECKPOINTS = {f"worker.model.{name}" for name in ("hub", "checkpoint", "families", "describe")} | {"huggingface_hub"}
MAX_LINES = 600
CATCH_ALL = {
    "coordinator/api/sse.py",
    "worker/node/rpc_errors.py",
    "worker/platform/run.py",
    "worker/platform/threads.py",
}
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


def rooms_import_only_leftwards(path: str, tree: ast.Module) -> Iterator[str]:
    package, *below = path.split("/")
    rooms = ROOMS.get(package, ())
    if len(below) < 2 or below[0] not in rooms:
        return
    allowed = rooms[: rooms.index(below[0]) + 1]
    for line, module in _imports(path, tree):
        root, *inside = module.split(".")
        if (
            root == package
            and not (inside and inside[0] in allowed)
            and ".".join([root, *inside[:1]]) not in BESIDE_ROOMS
        ):
            yield f"{path}:{line} imports {module}"


def ways_to(ends: Collection[str], module: str, trees: dict[str, ast.Module]) -> Iterator[list[str]]:
    """Chains of imports from a module of ours to one of `ends`, packages or modules."""
    seen = {module}
    ways = [[module]]
    while ways:
        way = ways.pop()
        path = _path_of(way[-1], trees)
        for _, name in _imports(path, trees[path]):
            if name in ends or name.split(".")[0] in ends:
                yield [*way, name]
            elif name not in seen and _path_of(name, trees) in trees:
                seen.add(name)
                ways.append([*way, name])


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
            yield from ((node.lineno, f"{module}.{alias.name}" if module else alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            literal = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, module) for module in literal)


def _path_of(module: str, trees: Collection[str] = ()) -> str:
    """The file of a module of ours, if it is one of these trees; a package is its `__init__`."""
    path = module.replace(".", "/")
    return package if (package := f"{path}/__init__.py") in trees else f"{path}.py"


CHECKERS: tuple[Checker, ...] = (
    imports_only_leftwards,
    rooms_import_only_leftwards,
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
PURE = sorted(
    {
        name.removesuffix(".py").replace("/", ".")
        for name in TREES
        if name.startswith(tuple(f"coordinator/{room}/" for room in PURE_ROOMS)) and not name.endswith("__init__.py")
    }
    | ALSO_PURE
)
WRITTEN = {name: tree for name, tree in TREES.items() if not is_generated(Path(name))}


def test_the_whole_tree_is_read() -> None:
    assert {name.split("/")[0] for name in TREES} == set(PACKAGES)
    assert set(CATCH_ALL) | {
        _path_of(module) for module in ALSO_PURE | BESIDE_ROOMS | CHECKPOINTS - {"huggingface_hub"}
    } <= set(TREES)
    assert {path.parent.name for path in FILES if path.parent.parent.name in ROOMS} == {
        room for rooms in ROOMS.values() for room in rooms
    }


def test_generated_code_imports_only_leftwards() -> None:
    found = [problem for name in TREES.keys() - WRITTEN.keys() for problem in imports_only_leftwards(name, TREES[name])]
    assert not found


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_tree_keeps_the_rule(checker: Checker) -> None:
    assert not [problem for name, tree in WRITTEN.items() for problem in checker(name, tree)]


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_reaches_no_world(module: str) -> None:
    assert not list(ways_to(WORLDLY, module, TREES))


@pytest.mark.parametrize("module", sorted(set(PURE) - ALSO_PURE))
def test_a_pure_room_reads_no_checkpoint(module: str) -> None:
    assert not list(ways_to(CHECKPOINTS, module, TREES))


def test_a_way_into_the_world_is_found_through_others() -> None:
    sources = {
        "coordinator/planning/a.py": "from coordinator.planning import b",
        "coordinator/planning/b.py": "import worker.errors",
        "worker/errors.py": "def f():\n    import grpc.aio",
    }
    trees = {path: ast.parse(source) for path, source in sources.items()}
    ways = [["coordinator.planning.a", "coordinator.planning.b", "worker.errors", "grpc.aio"]]
    assert list(ways_to(WORLDLY, "coordinator.planning.a", trees)) == ways
    assert not list(ways_to(WORLDLY, "coordinator.planning.a", trees | {"worker/errors.py": ast.parse("import os")}))


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in WRITTEN}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


@pytest.mark.parametrize(
    ("checker", "path", "source"),
    [
        (imports_only_leftwards, "worker/x.py", "import coordinator.planning.plan"),
        (imports_only_leftwards, "worker/x.py", "from coordinator import plan"),
        (imports_only_leftwards, "worker/x.py", "def f():\n    from tools.train_demo import main"),
        (imports_only_leftwards, "worker/x.py", "from ..coordinator import plan"),
        (imports_only_leftwards, "worker/x.py", "from .. import coordinator"),
        (
            imports_only_leftwards,
            "worker/x.py",
            "import importlib\nimportlib.import_module('coordinator.planning.plan')",
        ),
        (imports_only_leftwards, "protos/x.py", "import worker"),
        (imports_only_leftwards, "coordinator/x.py", "import tools"),
        (imports_only_leftwards, "tools/x.py", "from tests.tiny import make_model"),
        (rooms_import_only_leftwards, "worker/model/x.py", "import worker.memory.cache"),
        (rooms_import_only_leftwards, "worker/memory/x.py", "from worker.compute import engine"),
        (rooms_import_only_leftwards, "worker/compute/x.py", "from ..node import hop"),
        (rooms_import_only_leftwards, "coordinator/planning/x.py", "from coordinator.sessions.slots import Slots"),
        (rooms_import_only_leftwards, "coordinator/sessions/x.py", "def f():\n    import coordinator.cluster.chain"),
        (rooms_import_only_leftwards, "coordinator/cluster/x.py", "import coordinator.cli.app"),
        (rooms_import_only_leftwards, "coordinator/cluster/x.py", "import coordinator"),
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
        (
            imports_only_leftwards,
            "coordinator/x.py",
            "import worker.node.network\nfrom protos import brigade_pb2\nimport os",
        ),
        (imports_only_leftwards, "worker/x.py", "from .hop import take"),
        (
            rooms_import_only_leftwards,
            "worker/node/x.py",
            "from worker.compute.executor import Engine\nimport worker.errors",
        ),
        (rooms_import_only_leftwards, "coordinator/bench/x.py", "from coordinator.cluster.chain import Chain"),
        (rooms_import_only_leftwards, "coordinator/__main__.py", "from coordinator.cli.app import app"),
        (nothing_loads_code_from_data, "worker/x.py", "import yaml\nmx.eval(a)\nmodel.eval()\nyaml.safe_load(text)"),
        (only_three_places_catch_anything, "worker/node/rpc_errors.py", "try:\n    f()\nexcept Exception:\n    pass"),
        (only_three_places_catch_anything, "worker/x.py", "try:\n    f()\nexcept (OSError, ValueError):\n    pass"),
        (no_path_is_absolute, "worker/x.py", "a = '/'\nb = '/v1/models'\nc = 'home/me'"),
    ],
)
def test_what_is_allowed_passes(checker: Checker, path: str, source: str) -> None:
    assert not list(checker(path, ast.parse(source)))
