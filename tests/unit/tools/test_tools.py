"""Every tool can be imported, wherever what it uses has moved."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ELSEWHERE = {"tools.litellm_requests", "tools.schemathesis_hooks"}  # run with packages that are none of ours
TOOLS = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "tools").rglob("*.py"))
OWN = [name for name in TOOLS if name not in ELSEWHERE]


@pytest.mark.parametrize("name", OWN)
def test_every_tool_can_be_imported(name: str) -> None:
    assert importlib.import_module(name).__doc__
