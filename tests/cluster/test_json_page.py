"""docs/json.md has the keys that commands print, and no others. What is quick runs, on the bundled model.

What takes long (verify, bench) or a server (status) is printed by the same code from findings that are made here.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from coordinator.api.server import Server
from coordinator.api.status import cluster_state
from coordinator.bench.failover import FailoverReport, FailoverRow, LossTimes
from coordinator.bench.results import CLUSTER, Bench, BenchRow, FrameCosts
from coordinator.cli.app import app
from coordinator.cli.cache import listing, removal
from coordinator.cli.remote import answer_as_json
from coordinator.cluster.recovery import Recovered
from coordinator.deploy.checks import ModelInUse
from coordinator.deploy.discovery import Discovered, Endpoint, FoundNode
from coordinator.deploy.doctor import Examination
from coordinator.engine.engine import ServerState
from coordinator.engine.stats import FinishedRequest, Stats
from coordinator.engine.status import HopStatus, NodeStatus, RequestStatus, StatusSnapshot
from coordinator.quality.report import ComparedAnswer, Rounding, VerifyReport
from coordinator.sessions.output import Usage
from protos.brigade_pb2 import MEDIUM_LOOPBACK
from tests.cluster.commands import parse, run_here
from tests.cluster.test_pages import DOCS, sections
from tests.unit.deploy import cases
from worker.node.weights_cache import Kept

Json = dict[str, Any]
PAGE = sections((DOCS / "json.md").read_text(encoding="utf-8"))
BY_NAME = {"stage_ms", "parts_ms", "finished", "refused", "tokens_per_s_at"}  # keys are rows, parts, reasons, counts
HERE = ("--model", "demo", "--local", "0")


def keys_in(found: Any, before: str = "") -> Iterator[str]:
    """The path of every key, those of all entries of a list alike."""
    if isinstance(found, list):
        for each in found:
            yield from keys_in(each, f"{before}[]")
    elif isinstance(found, dict) and before.strip("[]").rpartition(".")[2] not in BY_NAME:
        for key, value in found.items():
            yield f"{before}.{key}"
            yield from keys_in(value, f"{before}.{key}")


def documented(section: str) -> list[Json]:
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE[section], re.DOTALL)]


def filled(kind: type, **given: Any) -> Any:
    """One of these with nothing in it but what is given."""
    return kind(**{field.name: given.get(field.name, 0) for field in fields(kind)})


def generated() -> Json:
    return parse(run_here("generate", "--raw", "Hi", *HERE, "--max-tokens", "2", "--logprobs", "1", "--json"))


def asked_of_a_server() -> Json:
    return answer_as_json("Hello", "stop", Usage(1, 0, 0, 0, 0, num_generated=2), ttft_s=0.1, decode_s=0.1)


def planned() -> Json:
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("nodes: [{name: a, memory: 1GiB, gbps: 1}, {name: b, memory: 1GiB, gbps: 1}]")
        file.flush()
        return parse(run_here("plan", "--nodes", file.name, "--model", "demo", "--json"))


def simulated() -> Json:
    return parse(run_here("plan", "--simulate", "--stage-ms", "26.5,6.5", "--concurrency", "1", "-g", "2", "--json"))


def verified() -> Json:
    case = ComparedAnswer("a", [1, 2], [1, 3], 0.5, {1: Rounding(0.002, 0.034)})
    return dict(json.loads(VerifyReport((), 1, [("mini", "a tensor")], cases=[case]).to_json()))


def benched() -> Json:
    rows = [filled(BenchRow, system=CLUSTER, layers=layers, decode="ar", concurrency=1) for layers in ([4, 4], [3, 5])]
    return Bench("machine", "demo", 4, 3, 1, rows, [FrameCosts([4, 4], [{1: 5.2}], [1.2])]).as_json()


def lost() -> Json:
    row = FailoverRow("killed", "spare", 128, filled(LossTimes), is_equal=True)
    return FailoverReport("machine", "demo", [4, 4], [row]).as_json()


def watched() -> Json:
    stats = Stats()
    stats.recent.append(filled(FinishedRequest, parts_ms={"wire": 1.0}))
    stats.recover(Recovered("StageLost", "mini", "story", 1.0, 2.0))
    now = StatusSnapshot(1, [filled(NodeStatus)], [filled(HopStatus)], [filled(RequestStatus)])
    spec = SimpleNamespace(num_layers=8, context=2048)
    served = SimpleNamespace(
        state=ServerState.READY, why="", stats=stats, names=("demo",), inputs=SimpleNamespace(spec=spec)
    )
    return cluster_state(cast(Server, served), now)


def examined() -> Json:
    known, wanted = cases.known(cases.node(), hops=[cases.hop()]), ModelInUse(cases.model())
    return Examination(known, wanted, "big", cases.judged(known, wanted)).as_json()


def heard() -> Json:
    endpoints = [Endpoint("127.0.0.1:1", "lo", MEDIUM_LOOPBACK)]
    return Discovered([FoundNode("mini", "0.1.0", None, True, None, endpoints)], 0).to_json()


PRINTED: dict[str, Callable[[], Json]] = {
    "brigade generate --json": generated,
    "brigade generate --server URL --json": asked_of_a_server,
    "brigade plan --json": planned,
    "brigade plan --simulate --json": simulated,
    "brigade score --json": lambda: parse(run_here("score", *HERE, "--json", stdin="Tom has 4 apples.")),
    "brigade verify --json": verified,
    "brigade bench --json": benched,
    "brigade bench --failover --json": lost,
    "brigade status --json": watched,
    "brigade doctor --json": examined,
    "brigade smoke --json": lambda: cases.tried().as_json(),
    "brigade nodes --json": heard,
    "brigade cache ls --json": lambda: listing(Path("shards"), [filled(Kept, places=(1,))]),
    "brigade cache rm --json": lambda: removal([filled(Kept, places=(1,))], []),
}


@pytest.mark.parametrize("command", PRINTED)
def test_the_page_has_the_keys_that_the_command_prints(command: str) -> None:
    [block] = documented(command)
    assert sorted(set(keys_in(PRINTED[command]()))) == sorted(set(keys_in(block)))


def test_the_page_has_the_keys_of_a_bridges_lines() -> None:
    asked = [
        {"id": "i", "op": "info"},
        {"id": "a", "op": "generate", "prompt": "Hi", "max_tokens": 2, "decode": "ar"},
        {"id": "x", "op": "sing"},
    ]
    outcome = run_here("bridge", *HERE, stdin="".join(f"{json.dumps(line)}\n" for line in asked))
    found = {key for line in outcome.out.splitlines() for key in keys_in(json.loads(line))}
    assert sorted(found) == sorted({key for block in documented("brigade bridge") for key in keys_in(block)})


def test_the_page_has_the_keys_of_a_batchs_lines(tmp_path: Path) -> None:
    asked, *answers = documented("brigade batch")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wrong = asked | {"custom_id": "b", "body": asked["body"] | {"max_tokens": 0}}
    source.write_text("".join(f"{json.dumps(line)}\n" for line in (asked, wrong)))
    assert run_here("batch", source, "-o", target, *HERE).code == 2
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    found, shown = ({each["custom_id"]: set(keys_in(each)) for each in some} for some in (lines, answers))
    assert found == shown


def has_json(command: Any) -> bool:
    inner = getattr(command, "commands", {}).values()
    return any("--json" in flag.opts for flag in command.params) or any(map(has_json, inner))


def test_every_command_with_json_has_its_section() -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flagged = {name for name, each in commands.items() if has_json(each)}
    assert flagged == {section.split()[1] for section in PAGE if "--json" in section} | {"demo"}
