"""`brigade plan --nodes`: what programs and people are told of Macs that are not there."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster import open as open_module
from coordinator.cluster import survey as survey_module
from coordinator.cluster.peer import Peer
from coordinator.planning.plan import Node
from coordinator.planning.speeds import LinkSpeed, NodeSpeed, Survey
from tests.tiny import make_model
from tests.unit.cli.conftest import Command
from worker.errors import ConfigError, InputError

MACS = """\
nodes:
  - {name: max, memory: MEMORY, gbps: GBPS}
  - {name: mini, memory: 1GiB, gbps: 0.01, link: {rtt_ms: 0.3, gbit: 20}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def planned(brigade: Command, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What `brigade plan --nodes` prints for these flags and this memory of the first Mac."""

    def planned(*flags: str, memory: str = "1GiB", gbps: str = "0.02") -> str:
        path = tmp_path / "nodes.yaml"
        path.write_text(MACS.replace("MEMORY", memory).replace("GBPS", gbps), encoding="utf-8")
        brigade("plan", "--nodes", str(path), "--model", str(tiny), "--context", "256", *flags)
        return capsys.readouterr().out

    return planned


def test_json_has_all_that_programs_rely_on(planned: Any) -> None:
    found = json.loads(planned("--json", "--layers", "3,1"))
    assert (found["fits"], found["objective"], found["layers"]) == (True, "latency", [3, 1])
    for node, name, start, end in zip(found["nodes"], ("max", "mini"), (0, 3), (3, 4), strict=True):
        assert (node["node"], node["start"], node["end"]) == (name, start, end)
        assert node["weight_bytes"] > 0 < node["cache_bytes"] and node["memory_bytes"] == 2**30
    stages, hops = ([node[key] for node in found["nodes"]] for key in ("stage_ms", "hop_ms"))
    assert hops == pytest.approx([0.15, 0.15], rel=0.01) and min(stages) > 0
    assert found["ms_per_token"] == pytest.approx(sum(stages) + sum(hops))
    assert found["tokens_per_s"] == pytest.approx(1e3 / found["ms_per_token"])
    assert found["tokens_per_s_at"]["8"] == pytest.approx(1e3 / max(stages)) and found["prefill_s_2000"] is None
    alone = {each["name"]: each for each in found["alternatives"]}["max alone"]
    assert (alone["layers"], alone["fits"]) == ([4], True) and alone["ms_per_token"] < found["ms_per_token"]
    assert alone["tokens_per_s_at"] == {"8": pytest.approx(1e3 / alone["ms_per_token"])}
    assert "max alone would be faster" in found["advice"]


def test_memory_is_kept_for_several_sessions_only_where_their_number_is_given(planned: Any) -> None:
    """`generate` and `serve` keep it for one, whatever the objective."""
    for flags, sessions in (((), 1), (("--objective", "throughput"), 1), (("--concurrency", "1,4"), 4)):
        assert json.loads(planned("--json", *flags))["sessions"] == sessions


def test_equal_plans_are_one_row(planned: Any) -> None:
    for gbps, last in (("0.02", ["max + mini", "even split"]), ("0.01", ["max + mini, even split"])):
        table = planned(gbps=gbps).partition("instead")[2].partition("\n\n")[0]
        rows = [line.partition("  ")[0] for line in table.splitlines()[1:]]
        assert rows == ["max alone", "mini alone", *last]


def test_times_of_a_model_that_decodes_whole_canvases_only_are_those_of_their_steps(
    brigade: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = Path(__file__).parents[2] / "fixtures" / "diffusion_gemma", tmp_path / "nodes.yaml"
    for tflops, told in (("", "canvases need `tflops`"), (", tflops: 1", " canvas steps/s of one request")):
        macs = MACS.replace("MEMORY", "1GiB").replace("GBPS", "0.02").replace("}\n", f"{tflops}}}\n")
        path.write_text(macs, encoding="utf-8")
        brigade("plan", "--nodes", str(path), "--model", str(folder))
        shown = " ".join(capsys.readouterr().out.split())
        assert told in shown and "per token" not in shown and "tok/s" not in shown
    brigade("plan", "--nodes", str(path), "--model", str(folder), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["ms_per_token"] is found["tokens_per_s"] is None and found["nodes"][0]["stage_ms"] > 0


def test_what_does_not_fit_is_printed_and_refused(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="does not fit: max lacks"):
        planned("--json", memory="10KiB")
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["advice"].startswith("It does not fit: max lacks")
    for flags, field in (
        (("--local", "1"), "local"), (("--config", "cluster.yaml"), "config"),
        (("--measure-again",), "measure_again"), (("--simulate", "--stage-ms", "1"), ""),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"not expected with --(nodes|simulate)") as refused:
            planned(*flags)
        assert not field or refused.value.field == field


def test_nodes_on_other_machines_are_measured_and_it_says_so(
    brigade: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = ((1, 1.0), (8, 2.0), (512, 40.0))

    @asynccontextmanager
    async def open_peers(*given: object) -> AsyncIterator[list[Peer]]:
        yield []

    async def ask_nodes(*given: object) -> list[Node]:
        return [Node("max", 2**30), Node("mini", 2**30)]

    async def known_speeds(*given: object, anew: bool) -> Survey:
        assert not anew
        return Survey(
            {name: NodeSpeed((times,), times, 546) for name in ("max", "mini")}, {"mini": LinkSpeed(0.3, 2e9)}
        )

    monkeypatch.setattr(open_module, "open_peers", open_peers)
    monkeypatch.setattr(open_module, "ask_nodes", ask_nodes)
    monkeypatch.setattr(survey_module, "known_speeds", known_speeds)
    brigade("plan", "--model", str(tiny), "--objective", "throughput", "--concurrency", "4")
    told = " ".join(capsys.readouterr().out.split())
    assert "max [0, 2)" in told and "max 546 GB/s measured" in told and "0.15 ms" in told
    assert "of 4 at once" in told and "prompts: " not in told and "at least" not in told


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ((), "write"),
        (("--local", "1"), "write"),
        (("--config", "FILE"), "write"),
        (("--config", "FILE", "--local", "1"), "local"),
        (("--config", "FILE", "--layers", "2,2"), "layers"),
    ],
)
def test_only_some_files_are_written(brigade: Command, tmp_path: Path, flags: tuple[str, ...], field: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("{layers: [1, 3], workers: [{name: a, address: '127.0.0.1:1'}]}", encoding="utf-8")
    with pytest.raises(InputError) as refused:
        brigade("plan", "--write", *(str(path) if flag == "FILE" else flag for flag in flags))
    assert refused.value.field == field
    path.write_text("workers: [{name: a, address: '127.0.0.1:1'}]", encoding="utf-8")
    path.chmod(0o444)
    with pytest.raises(ConfigError, match=r"cluster\.yaml is read-only: expected a file that may be changed"):
        brigade("plan", "--write", "--config", str(path))  # before any node is asked


def test_a_context_beyond_the_models_is_told(brigade: Command, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    room = json.loads((tiny / "config.json").read_text())["max_position_embeddings"]
    told = f"note: planned for {room} tokens: {tiny} has no room for 9999\n"
    for flags, note in (((), ""), (("--context", "2"), ""), (("--context", "9999"), told)):
        brigade("plan", "--model", str(tiny), *flags)
        shown = capsys.readouterr()
        assert re.search(r"of\s+\d+\s+tokens", shown.out), "the line wraps where the folder's name is long"
        assert shown.err == note
    brigade("plan", "--model", str(tiny), "--local", "1")  # nothing was measured
    assert "How fast these nodes are is not known" in " ".join(capsys.readouterr().out.split())
