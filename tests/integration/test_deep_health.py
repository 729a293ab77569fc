"""`/health?deep=1`: a token through all stages."""

from pathlib import Path

from coordinator.http.about import _send_token
from coordinator.http.served import Served
from coordinator.resident.ask import Ask
from coordinator.resident.several import collect
from tests.cluster.models import make_talker
from tests.integration.test_score_doors import resident


async def test_a_look_goes_through_every_stage_and_is_no_request_of_a_client(tmp_path: Path) -> None:
    async with resident(make_talker(tmp_path / "model"), (1, 3)) as model:
        served = Served(model.frontend, ("talker",), 0, tally=model.tally)
        served.take(model)
        await _send_token(served)
        tally = model.tally
        assert [stage.num_frames for stage in tally.flow.stages] == [1, 1]
        assert tally.flow.parts["recovery"] == 0
        counted = (tally.recent, tally.finished, tally.refused, tally.generation_tokens, tally.prompt_tokens)
        assert not any(counted) and not any(sum(each.counts) for each in tally.histograms.values())
        await collect(model, [await model.prepare(Ask((0,), max_tokens=1, ignore_eos=True))])
        assert len(tally.recent) == 1
