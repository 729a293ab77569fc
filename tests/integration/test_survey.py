"""Nodes measure themselves and their links: what a coordinator learns, who may ask, and how layers follow from it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster import survey as survey_module
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.cluster.survey import known_speeds
from coordinator.planning.speeds import NO_SPEEDS, UNMEASURED, Survey
from protos.brigade_pb2 import LinkReply, MeasureRequest, ProbePart, RowTimes, Speed
from tests.integration.conftest import Models, RunningNode, load_request, opened, serving
from tests.unit.virtual_time import VirtualTime
from worker.compute import microbenchmark
from worker.config import ClusterConfig
from worker.errors import FrameError, StageLost
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe
from worker.node import speed_cache
from worker.node.links import answer_probe

MEASURED_S = 0.05  # instead of two seconds
OPTIONS = ClusterOptions(ClusterConfig(), "", None, 128)


@pytest.fixture(autouse=True)
def quickly_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a moment, kept in a folder of the test's own, though all nodes are of one machine."""
    monkeypatch.setattr(survey_module, "is_worth_measuring", lambda peers: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    quickly = partial(microbenchmark.measure_speed, within_s=MEASURED_S)
    monkeypatch.setattr(speed_cache, "measure_speed", quickly)


@asynccontextmanager
async def peers_of(nodes: Sequence[RunningNode]) -> AsyncIterator[list[Peer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(node.reached()) for node in nodes]


async def surveyed(folder: Path, nodes: Sequence[RunningNode]) -> Survey:
    async with peers_of(nodes) as peers:
        return await known_speeds(OPTIONS, open_folder(folder), peers)


async def test_every_node_and_every_hop_are_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(2) as nodes:
        found = await surveyed(folder, nodes)
        assert capsys.readouterr().err.startswith("measuring how fast every node is")
        kept = [(await surveyed(folder, nodes)).speeds for _ in range(2)]  # by the last of them, as they share a folder
        assert kept[0] == kept[1] and capsys.readouterr().err == ""
    spec = describe(open_folder(folder))
    assert found.covers(["coordinator", "node-1", "node-2"])
    for speed in found.speeds.values():
        assert speed.is_measured and speed.gbps > 0
        layers, sampled = speed.ms_up_to(spec, 1), speed.ms_up_to(spec, 1, 1)
        assert all(before < after for before, after in pairwise(layers)) and layers[-1] < sampled[-1]
    assert set(found.ports) == {"node-1", "node-2"} and set(found.links) == {("node-1", "node-2")}
    for link in (*found.ports.values(), *found.links.values()):
        assert 0 < link.rtt_ms < 1000 and 1e6 < link.bytes_per_s < 1e12


async def test_a_survey_beside_an_open_chain_does_not_measure_this_node(folder: Path) -> None:
    """One thread of a process owns MLX, and the chain uses it."""
    async with serving(1) as nodes, peers_of(nodes) as peers:
        found = await known_speeds(OPTIONS, open_folder(folder), peers, NO_SPEEDS)
    assert set(found.speeds) == {"node-1"}


@pytest.mark.parametrize(
    "change",
    [
        {"kinds": [RowTimes(rows=[2], ms=[1.0])]},
        {"kinds": [RowTimes(rows=[1, 4, 2], ms=[1.0, 1.0, 1.0])]},
        {"kinds": [RowTimes(rows=[1, 2], ms=[1.0])]},
        {"kinds": [RowTimes(rows=[1], ms=[nan])]},
        {"kinds": [RowTimes(rows=[1], ms=[1e308])]},
        {"gbps": 5e-324},
        {"kinds": [RowTimes(rows=[1], ms=[1.0])] * 2},
        {"head": RowTimes()},
        {"gbps": 0.0},
    ],
)
async def test_a_node_whose_speed_makes_no_sense_is_left_out(
    change: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = RowTimes(rows=[1], ms=[1.0])
    found = Speed(**{"kinds": [once], "head": once, "gbps": 1.0} | change)

    async def measure(peer: Peer, request: MeasureRequest) -> Speed:
        return found

    monkeypatch.setattr(Peer, "measure", measure)
    async with serving(1) as nodes, peers_of(nodes) as peers:
        measured = await known_speeds(OPTIONS, open_folder(folder), peers, NO_SPEEDS)
    assert not measured.speeds and "not measured: node-1" in capsys.readouterr().err


async def test_a_node_that_serves_tells_only_what_it_has_kept(folder: Path) -> None:
    request = MeasureRequest(model=load_request(folder, 1, 4))
    async with serving(1) as nodes, peers_of(nodes) as [peer]:
        async with opened(folder, (2, 2), nodes):
            assert await peer.measure(request) == Speed()
        found = await peer.measure(request)
        assert found.kinds
        async with opened(folder, (2, 2), nodes):
            assert await peer.measure(request) == found


async def test_all_measure_themselves_again_if_they_are_asked_to(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, num_gauged = models("qwen3").folder, 0
    measure_speed = speed_cache.measure_speed

    def counted(checkpoint: Checkpoint) -> Speed:
        nonlocal num_gauged
        num_gauged += 1
        return measure_speed(checkpoint)

    monkeypatch.setattr(speed_cache, "measure_speed", counted)
    async with serving(2) as nodes, peers_of(nodes) as peers:
        for anew, expected in ((True, 3), (False, 3), (True, 6)):
            await known_speeds(OPTIONS, open_folder(folder), peers, anew=anew)
            assert num_gauged == expected
            assert bool(capsys.readouterr().err) == anew


async def test_a_node_of_another_model_is_left_out_aloud(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(1, model=models("llama").folder) as nodes:
        found = await surveyed(models("qwen3").folder, nodes)
    assert not found.covers(["node-1"]) and found.covers(["coordinator"])
    assert "warning: not measured: worker node-1: " in capsys.readouterr().err


@pytest.mark.parametrize("parts", [[ProbePart()] * 97, [ProbePart(data=bytes(2**20 + 1))]], ids=["many", "large"])
async def test_a_probe_has_an_end(parts: list[ProbePart]) -> None:
    async def sent() -> AsyncIterator[ProbePart]:
        for part in parts:
            yield part

    with pytest.raises(FrameError, match="expected at most 96 parts"):
        async for _ in answer_probe(sent()):
            pass


def test_an_idle_probe_is_ended() -> None:
    """A node serves only so many calls at one time."""

    async def idle() -> AsyncIterator[ProbePart]:
        yield ProbePart()
        await asyncio.Event().wait()

    async def answer() -> None:
        async for _ in answer_probe(idle()):
            pass

    virtual = VirtualTime()
    try:
        with pytest.raises(FrameError, match="expected a probe to end within 5 s"):
            virtual.run(answer())
    finally:
        virtual.close()


async def test_a_link_that_cannot_be_measured_counts_as_the_slowest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_link = Peer.measure_link

    async def fail_for_some(peer: Peer, successor: Peer | None = None) -> LinkReply:
        if successor or peer.name == "node-2":
            raise StageLost("did not answer a probe within 5 s", node=peer.name)
        return await measure_link(peer)

    monkeypatch.setattr(Peer, "measure_link", fail_for_some)
    async with serving(2) as nodes:
        found = await surveyed(folder, nodes)
    assert found.link("coordinator", "node-1").rtt_ms < UNMEASURED.rtt_ms
    assert found.link("coordinator", "node-2") == found.link("node-1", "node-2") == UNMEASURED
    assert capsys.readouterr().err.count("warning: not measured: ") == 2
