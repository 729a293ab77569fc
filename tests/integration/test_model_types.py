"""The model types that people join Macs for, tiny, over real servers: the tokens of mlx-lm's whole model."""

from pathlib import Path

import pytest

from coordinator.cluster.open import read_model
from protos.brigade_pb2 import Sampling
from tests.integration.conftest import Pass, Whole, answer, running
from tests.integration.many import request, solo, together, tokens_of
from tests.integration.many import two_lanes as two_lanes
from tools.model_types.make import make_type
from worker.model import families
from worker.model.checkpoint import open_folder
from worker.model.families import LaneForm, lane_form

TYPES = (
    "qwen3_moe", "glm4_moe", "minimax", "gpt_oss", "qwen3_5_moe", "qwen3_next", "step3p5", "llama", "deepseek_v3",
    "kimi_k25", "gemma3", "mistral3",
)  # fmt: skip
SAMPLE = ("gpt_oss", "qwen3_next", "deepseek_v3")
SPLIT = (2, 3, 1)  # of six layers
PROMPT = tokens_of(27)
NUM_TOKENS = 6
SAMPLINGS = (Sampling(), Sampling(seed=5, temperature=1.2, top_p=0.9, top_k=20, min_p=0.02, repetition_penalty=1.3))
AT_ONCE = [
    request(tokens_of(3, 1), 5),
    request(tokens_of(19, 2), 4, seed=3, temperature=1.0),
    request(tokens_of(9, 3), 6, seed=4, temperature=0.8, top_k=12),
]


@pytest.mark.usefixtures("two_lanes")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.matrix) for name in TYPES]
)
async def test_a_coordinator_and_two_workers_give_the_whole_models_tokens_alone_and_in_lanes(
    tmp_path: Path, passes: list[Pass], name: str
) -> None:
    whole = Whole(make_type(tmp_path / name, name))
    async with running(whole.folder, SPLIT) as chain:
        for sampling in SAMPLINGS:
            found = await answer(chain, PROMPT, NUM_TOKENS, sampling)
            assert found.tokens == whole.tokens(PROMPT, NUM_TOKENS, sampling)
        alone = [each.tokens for each in await solo(chain, AT_ONCE)]
        passes.clear()
        assert [each.tokens for each in await together(chain, AT_ONCE)] == alone
    assert max(len(each.rows) for each in passes) > 1, "no two windows ever shared a pass"
    assert lane_form(open_folder(whole.folder).config) is not LaneForm.ALONE
    assert len({tuple(tokens) for tokens in alone}) == len(AT_ONCE)


async def test_a_type_that_no_test_has_seen_says_so_once_and_steps_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await read_model(str(folder))
    assert capsys.readouterr().err == "" and lane_form(open_folder(folder).config) is LaneForm.ROWS
    monkeypatch.delitem(families.LANE_OF, "qwen3")
    await read_model(str(folder))
    said = "note: no test has seen a qwen3 model yet; compare with `brigade verify` before you rely on it\n"
    assert capsys.readouterr().err == said
    assert lane_form(open_folder(folder).config) is LaneForm.ALONE
