"""The page and the dashboard: what can be said of them without a server."""

import base64
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.metrics import metrics_text
from coordinator.api.server import Server
from coordinator.api.status import content_policy
from coordinator.engine.status import StatusSnapshot
from coordinator.sessions.waterfall import PARTS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "coordinator/api/page.html").read_text(encoding="utf-8")


def test_the_policy_allows_the_pages_own_script_and_style_only() -> None:
    policy = dict(part.strip().split(" ", 1) for part in content_policy(PAGE).split(";"))
    [script] = re.findall("<script>(.*?)</script>", PAGE, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in content_policy(PAGE)
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "http://", "https://"):
        assert forbidden not in PAGE  # it makes no markup of text and names no other place


def test_every_part_of_a_tokens_time_has_a_colour() -> None:
    [listed] = re.findall(r"const PARTS = (\[.*?\]);", PAGE)
    coloured = re.findall(r"\.part-(\d+) { background: var\(--p-\w+\)", PAGE)
    assert set(PARTS) == set(json.loads(listed)) and list(coloured) == [str(number) for number in range(len(PARTS))]


def test_every_metric_of_the_dashboard_exists() -> None:
    frontend: Any = SimpleNamespace(spec=None)
    families = text_string_to_metric_families(metrics_text(Server(frontend, ["m"]), StatusSnapshot()).decode())
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
    known = {family.name + ending for family in families for ending in endings[family.type]}
    dashboard = json.loads((ROOT / "tools/grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    named = {name for query in queries for name in re.findall(r"brigade_\w+", query)}
    assert len(queries) >= 12 and named <= known
