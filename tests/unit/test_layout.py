"""Which packages and rooms may import which, and which modules stay pure, read from the syntax trees."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "worker", "coordinator", "tools")  # each may import itself and what stands left of it
ROOMS = {  # likewise; what stands beside the rooms (errors, config) may be imported by all of them
    "worker": ("platform", "model", "memory", "compute", "drafters", "node"),
    "coordinator": tuple(
        ["planning", "decoding", "sessions", "cluster", "engine", "api", "deploy", "bench", "quality", "cli"]
    ),
}
BESIDE_ROOMS = {"worker.errors", "worker.config"}
PURE_ROOMS = ("planning", "decoding", "sessions")
ALSO_PURE = {
    "coordinator.bench.simulate", "coordinator.cli.trace", "worker.compute.header", "worker.node.framing",
    "coordinator.deploy.checks", "coordinator.deploy.findings", "coordinator.deploy.install",
}  # fmt: skip
WORLDLY = {"grpc", "asyncio", "mlx", "mlx_lm", "time", "socket", "uvloop"}
# what finds and reads checkpoints: what comes of it, ModelSpec, is plain numbers
CHECKPOINTS = {f"worker.model.{name}" for name in ("hub", "checkpoint", "families", "describe")} | {"huggingface_hub"}
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
PURE = ALSO_PURE | {
    name.removesuffix(".py").replace("/", ".")
    for name in TREES
    if name.startswith(tuple(f"coordinator/{room}/" for room in PURE_ROOMS)) and not name.endswith("__init__.py")
}


def imports(path: str, tree: ast.Module) -> Iterator[str]:
    """Every imported module, also inside functions and type-checking blocks; relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def wrong_imports(path: str, tree: ast.Module) -> list[str]:
    """Imports of a package or a room that stands to the right."""
    package, *below = path.split("/")
    packages, rooms = PACKAGES[: PACKAGES.index(package) + 1], ROOMS.get(package, ())
    is_in_room = len(below) > 1 and below[0] in rooms
    found = []
    for module in imports(path, tree):
        root, *inside = module.split(".")
        if root == "tests" or (root in PACKAGES and root not in packages):
            found.append(module)
        elif is_in_room and root == package and ".".join([root, *inside[:1]]) not in BESIDE_ROOMS:
            found += [module] * (not inside or inside[0] not in rooms[: rooms.index(below[0]) + 1])
    return found


def ways_to(ends: Collection[str], module: str, imported: dict[str, list[str]]) -> Iterator[list[str]]:
    """Chains of imports from a module of ours to one of `ends`, packages or modules."""
    seen, ways = {module}, [[module]]
    while ways:
        way = ways.pop()
        for name in imported[path_of(way[-1], imported)]:
            if name in ends or name.split(".")[0] in ends:
                yield [*way, name]
            elif name not in seen and path_of(name, imported) in imported:
                seen.add(name)
                ways.append([*way, name])


def path_of(module: str, paths: Collection[str]) -> str:
    """The file of a module of ours; a package is its `__init__`."""
    path = module.replace(".", "/")
    return package if (package := f"{path}/__init__.py") in paths else f"{path}.py"


def test_packages_and_rooms_import_only_leftwards() -> None:
    assert not {path: wrong for path, tree in TREES.items() if (wrong := wrong_imports(path, tree))}


def test_a_pure_module_reaches_no_world_and_a_pure_room_no_checkpoint() -> None:
    imported = {path: list(imports(path, tree)) for path, tree in TREES.items()}
    for module in PURE:
        assert not list(ways_to(WORLDLY if module in ALSO_PURE else WORLDLY | CHECKPOINTS, module, imported))


def test_a_breach_is_found() -> None:
    for path, source in (
        ("worker/x.py", "import coordinator.planning.plan"),
        ("worker/x.py", "def f():\n    from tools.train_demo import main"),
        ("worker/x.py", "from ..coordinator import plan"),
        ("worker/x.py", "from .. import coordinator"),
        ("worker/x.py", "import importlib\nimportlib.import_module('coordinator.planning.plan')"),
        ("tools/x.py", "from tests.tiny import make_model"),
        ("worker/model/x.py", "import worker.memory.layer_cache"),
        ("worker/compute/x.py", "from ..node import hop"),
        ("coordinator/cluster/x.py", "import coordinator"),
    ):
        assert wrong_imports(path, ast.parse(source)), source
    for path, source in (
        ("coordinator/x.py", "import worker.node.network\nfrom protos import brigade_pb2\nimport os"),
        ("worker/node/x.py", "from worker.compute.executor import Engine\nimport worker.errors"),
        ("coordinator/__main__.py", "from coordinator.cli.app import app"),
    ):
        assert not wrong_imports(path, ast.parse(source)), source
    sources = {
        "coordinator/planning/a.py": "from coordinator.planning import b",
        "coordinator/planning/b.py": "import worker.errors",
        "worker/errors.py": "def f():\n    import grpc.aio",
    }
    imported = {path: list(imports(path, ast.parse(source))) for path, source in sources.items()}
    ways = [["coordinator.planning.a", "coordinator.planning.b", "worker.errors", "grpc.aio"]]
    assert list(ways_to(WORLDLY, "coordinator.planning.a", imported)) == ways
