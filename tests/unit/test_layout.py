"""Which packages and rooms may import which, and which modules stay pure, read from the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "worker", "coordinator", "tools")  # each may import itself and those to its left
ROOMS = {  # likewise; modules beside the rooms (errors, config) may be imported by all of them
    "worker": ("platform", "model", "memory", "compute", "drafters", "node"),
    "coordinator": (
        *("planning", "decoding", "sessions", "cluster", "engine", "api", "deploy", "bench", "quality", "cli"),
    ),
}
PURE_ROOMS = tuple(f"coordinator/{room}/" for room in ("planning", "decoding", "sessions"))
ALSO_PURE = {
    "coordinator/bench/simulate.py", "coordinator/cli/trace.py", "worker/compute/header.py", "worker/node/framing.py",
    "coordinator/deploy/checks.py", "coordinator/deploy/findings.py", "coordinator/deploy/install.py",
}  # fmt: skip
WORLDLY = {"grpc", "asyncio", "mlx", "mlx_lm", "time", "socket", "uvloop"}
# what finds and reads checkpoints: what comes of it, ModelSpec, is plain numbers
CHECKPOINTS = {f"worker.model.{name}" for name in ("hub", "checkpoint", "families", "describe")} | {"huggingface_hub"}


def imports(path: str, source: str) -> set[str]:
    """Every imported module, also inside functions and type-checking blocks; relative ones resolved."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
    return found


def wrong_imports(path: str, modules: set[str]) -> list[str]:
    """Imports of a package or a room to the right."""
    package, below, *_ = path.split("/")
    rooms = ROOMS.get(package, ())
    room = rooms.index(below) if below in rooms else len(rooms)
    found = []
    for module in modules:
        root, inside = (*module.split("."), "")[:2]
        right = root in PACKAGES and PACKAGES.index(root) > PACKAGES.index(package)
        right |= root == package and inside in rooms and rooms.index(inside) > room
        found += [module] if right or root == "tests" else []
    return found


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """The imports of every file of the product and its tools."""
    paths = {str(path.relative_to(ROOT)): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    return {path: imports(path, file.read_text(encoding="utf-8")) for path, file in paths.items()}


def test_packages_and_rooms_import_only_leftwards(imported: dict[str, set[str]]) -> None:
    assert not {path: wrong for path, modules in imported.items() if (wrong := wrong_imports(path, modules))}
    for path, source in (
        ("worker/x.py", "def f():\n    from tools.train_demo import main"),
        ("worker/x.py", "from ..coordinator import plan"),
        ("tools/x.py", "from tests.tiny import make_model"),
        ("worker/model/x.py", "import worker.memory.kv_cache"),
        ("worker/compute/x.py", "from ..node import hop"),
    ):
        assert wrong_imports(path, imports(path, source)), source


def test_a_pure_module_reaches_nothing_worldly_and_a_pure_room_no_checkpoint(imported: dict[str, set[str]]) -> None:
    def reached(path: str) -> set[str]:
        """Every module that this one imports, directly or through others of ours, and their packages."""
        found, left = set[str](), [path]
        while left:
            new = imported[left.pop()] - found
            found |= new
            for module in new:
                stem = module.replace(".", "/")
                left += [each for each in (f"{stem}.py", f"{stem}/__init__.py") if each in imported]
        return found | {module.partition(".")[0] for module in found}

    for path in imported:
        if path in ALSO_PURE or path.startswith(PURE_ROOMS):
            assert not reached(path) & (WORLDLY if path in ALSO_PURE else WORLDLY | CHECKPOINTS), path
    assert "grpc" in reached("coordinator/cluster/chain.py") and imported.keys() >= ALSO_PURE
