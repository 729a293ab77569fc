"""Every tool can be imported, wherever what it uses has moved."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"tools.litellm_requests"}  # runs with packages that are not installed here
TOOLS = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "tools").rglob("*.py"))


def test_every_tool_can_be_imported() -> None:
    assert all(importlib.import_module(name).__doc__ for name in TOOLS if name not in ELSEWHERE)
