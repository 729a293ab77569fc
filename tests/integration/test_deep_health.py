"""`/health?deep=1`: a token through all stages."""

from pathlib import Path

from coordinator.api.server import Server
from coordinator.engine.engine import collect
from coordinator.sessions.request import RequestSpec
from tests.cluster.models import make_talker
from tests.integration.test_scores import resident


async def test_a_look_goes_through_every_stage_and_is_no_request_of_a_client(tmp_path: Path) -> None:
    async with resident(make_talker(tmp_path / "model"), (1, 3)) as model:
        served = Server(model.inputs, ("talker",), stats=model.stats)
        served.open(model)
        await served.probe()
        stats = model.stats
        assert [stage.num_frames for stage in stats.stages.totals] == [1, 1]
        assert stats.stages.parts["recovery"] == 0
        assert not stats.recent and not any(stats.total(name) for name in stats.counters)
        samples = [sample for family in stats.registry.collect() for sample in family.samples]
        assert not any(sample.value for sample in samples if not sample.name.endswith("_created"))
        await collect(model, [await model.prepare(RequestSpec((0,), max_tokens=1, ignore_eos=True))])
        assert len(stats.recent) == 1
