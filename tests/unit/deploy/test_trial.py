"""What a trial tells of its hops, and what it advises where there was none."""

import pytest

from coordinator.deploy.trial import TriedHop, advice, hops_of
from tests.unit.deploy.cases import tried
from worker.errors import BrigadeError, ConfigError, ModelError, NodeBusy, OutOfMemory, StageLost


def test_a_hop_has_what_its_stage_sent_and_how_long_a_frame_was_on_the_way() -> None:
    trial = tried()
    assert trial.hops == [TriedHop("studio", "mini", 100, 1.0), TriedHop("mini", "studio", 6, 3.0)]
    assert trial.is_same and not tried(second=(7, 9)).is_same


def test_one_node_has_no_hops() -> None:
    leg = tried().first.usage.legs[0]
    alone = type(leg.route)(leg.route.nodes[:1], [0])
    passage = type(leg.passages[0])(leg.passages[0].timings[:1], leg.passages[0].returned)
    assert hops_of([type(leg)(alone, [passage])], tried().first.statuses[:1], tried().first.statuses[:1]) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NodeBusy("serves"), "brigade generate --server"),
        (OutOfMemory("none"), "brigade plan --config a.yaml"),
        (ModelError("none"), "brigade plan --config a.yaml tells whether it fits"),
        (ConfigError("none"), "brigade plan --config a.yaml tells whether it fits"),
        (StageLost("gone"), "brigade doctor --config a.yaml tells what is wrong"),
    ],
)
def test_there_is_something_to_do_about_every_failure(error: BrigadeError, words: str) -> None:
    assert words in advice(error, "--config a.yaml")
