"""With --check-finite the stage that makes NaN is named, and only the session that it is of ends."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.cluster.deployment import Deployment
from coordinator.engine.engine import Engine
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tests.cluster.commands import run_here
from tests.cluster.models import altered_copy, make_talker
from tests.integration.conftest import CHUNK, Whole, opened, serving
from worker.errors import FrameError, SamplingError

POISON = 77  # a token whose embedding is not finite
PROMPT = tuple(range(10, 10 + 2 * CHUNK))
Change = Callable[[dict[str, mx.array]], None]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers."""
    return make_talker(tmp_path_factory.mktemp("finite") / "model")


def infinite(layer: int) -> Change:
    def change(weights: dict[str, mx.array]) -> None:
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        weights[name] = mx.full(weights[name].shape, mx.inf, weights[name].dtype)

    return change


def poisoned(weights: dict[str, mx.array]) -> None:
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = mx.where((mx.arange(len(table)) == POISON)[:, None], mx.nan, table)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chain has its stages check what they make."""
    monkeypatch.setattr(Deployment.__init__, "__defaults__", (True, True, 0, b""))


def test_generate_names_the_stage_that_makes_what_is_not_finite(talker: Path, tmp_path: Path) -> None:
    model = altered_copy(talker, tmp_path / "model", infinite(2))
    command = ("generate", "hello", "--model", model, "--local", "2", "--layers", "1,2,1", "--max-tokens", "3")
    outcome = run_here(*command, "--check-finite")
    assert outcome.code == 3
    said = "error: worker worker-1: layers [1, 3), stage 1, made values that are not finite, of slot 0 (step "
    assert said in outcome.err


@pytest.mark.parametrize(
    ("layer", "stage"), [(0, r"layers \[0, 1\), stage 0"), (3, r"worker node-2: layers \[3, 4\), stage 2")]
)
async def test_the_end_stages_are_named(talker: Path, tmp_path: Path, checked: None, layer: int, stage: str) -> None:
    model = altered_copy(talker, tmp_path / "model", infinite(layer))
    with pytest.raises(FrameError, match=f"^{stage}, made values that are not finite, of slot 0"):
        async with serving(2) as nodes, opened(model, (1, 2, 1), nodes) as chain, Engine(chain) as engine:
            await engine.answer(Request(PROMPT, 3))


async def test_only_the_session_that_it_is_of_ends(talker: Path, tmp_path: Path, checked: None) -> None:
    """Both run together, over two stages that check."""
    model = altered_copy(talker, tmp_path / "model", poisoned)
    async with serving(1) as nodes, opened(model, (2, 2), nodes) as chain, Engine(chain) as engine:
        alone = (await engine.answer(Request(PROMPT, 30))).tokens
        sound = asyncio.create_task(engine.answer(Request(PROMPT, 30)))
        with pytest.raises(FrameError, match=r"^layers \[0, 2\), stage 0, made values that are not finite"):
            await engine.answer(Request((*PROMPT[:5], POISON), 30))
        assert (await sound).tokens == alone


async def test_what_is_neither_finite_nor_sampled_ends_alone(talker: Path, tmp_path: Path, checked: None) -> None:
    """Its two failures are one."""
    model = altered_copy(talker, tmp_path / "model", infinite(3))
    refused = Request(PROMPT, 3, sampling=Sampling(temperature=1, top_k=1 << 20))
    async with serving(1) as nodes, opened(model, (2, 2), nodes) as chain, Engine(chain) as engine:
        for asked in (refused, refused):
            with pytest.raises(SamplingError):
                await engine.answer(asked)


async def test_a_check_changes_no_token(talker: Path, checked: None) -> None:
    async with serving(1) as nodes, opened(talker, (2, 2), nodes) as chain, Engine(chain) as engine:
        assert (await engine.answer(Request(PROMPT, 12))).tokens == Whole(talker).tokens(PROMPT, 12)
