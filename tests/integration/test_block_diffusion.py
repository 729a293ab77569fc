"""Block diffusion over the chain: the tokens of a numpy reference of SDAR and Fast-dLLM v2, on every split.

The reference is written from the papers (arXiv 2510.06303, 2509.26328) and the published configurations. It was not
compared with the authors' code or weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import Decode, suit
from coordinator.deploy.trial import NUM_TOKENS, try_cluster
from coordinator.engine.engine import Engine, generate_once
from coordinator.sessions.request import Request, check_request
from protos.brigade_pb2 import Cache, Grammar, Sampling
from tests.integration.conftest import CHUNK, Pass, running
from tests.integration.many import Live, solo, together, tokens_of
from tests.integration.test_recovery import COMES_BACK, LAYERS, lose, supervised
from tests.tiny import make_model
from worker.errors import InputError, ModelError
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.model.families import canvas_training_of

MASK = 90
N = 21
SPLITS = ((4,), (1, 3), (3, 1), (2, 1, 1), (1, 1, 1, 1))
splits = pytest.mark.parametrize(
    "layers",
    [pytest.param(each, marks=() if each in SPLITS[::3] else pytest.mark.matrix) for each in SPLITS],
    ids=lambda layers: "+".join(map(str, layers)),
)
_FAMILIES = {"sdar": "qwen3", "sdar_moe": "qwen3_moe", "Fast_dLLM_Qwen": "qwen2", "causal": "qwen3"}
_CONFIGS = {
    "sdar": {"model_type": "sdar", "mask_token_id": MASK},
    "sdar_moe": {"model_type": "sdar_moe", "mask_token_id": MASK},
    "Fast_dLLM_Qwen": {"model_type": "Fast_dLLM_Qwen", "mask_token_id": MASK, "bd_size": 16},
    "causal": {"mask_token_id": MASK, "canvas_length": 6},
}
_TRAINED = {  # blocks and parts of them, and the lengths of prompts that are compared with the reference
    "sdar": (4, 4, (1, 3, 4, 9, 16)),
    "Fast_dLLM_Qwen": (16, 8, (1, 5, 8, 19)),
    "causal": (1, 6, (1, 7, 12)),
}
types = pytest.mark.parametrize("name", _TRAINED)
_MATRIX = ("causal", "sdar_moe")  # `causal` has no grid, the experts of `sdar_moe` know of no canvas
configs = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in _MATRIX else ()) for name in _CONFIGS]
)
few = pytest.mark.parametrize(  # where canvases have another grid, or none, is no matter
    "name", [pytest.param(name, marks=pytest.mark.matrix if name != "sdar" else ()) for name in _CONFIGS]
)
Expected = Callable[[str], dict[int, list[int]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_model(tmp_path_factory.mktemp("canvas") / name, _FAMILIES[name], config=config, sharpen=4.0)
        for name, config in _CONFIGS.items()
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Expected:
    """What the reference answers to prompts of these lengths."""

    @cache
    def answers(name: str) -> dict[int, list[int]]:
        reference = Numpy(folders[name])
        block, part, lengths = _TRAINED[name]
        shift = name == "Fast_dLLM_Qwen"
        return {
            length: reference.generate(tokens_of(length), N, max(block, part), block, part, shift) for length in lengths
        }

    return answers


class Numpy:
    """qwen2 and qwen3 layers in float64, all rows at once, each with the last row that it sees."""

    def __init__(self, folder: Path) -> None:
        self.config = open_folder(folder).config
        tensors = mx.load(str(folder / "model.safetensors"))
        self._w = {name: np.array(array.astype(mx.float32), np.float64) for name, array in tensors.items()}  # type: ignore[union-attr]

    def logits(self, tokens: Sequence[int], last_seen: Sequence[int]) -> np.ndarray:
        w, c = self._w, self.config
        heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        rows = np.arange(len(tokens))
        angles = rows[:, None] * c["rope_theta"] ** (-np.arange(0, size, 2) / size)
        h = w["model.embed_tokens.weight"][list(tokens)]
        for number in range(c["num_hidden_layers"]):
            at = f"model.layers.{number}."

            def project(name: str, x: np.ndarray, at: str = at) -> np.ndarray:
                y = x @ w[f"{at}{name}.weight"].T
                bias = w.get(f"{at}{name}.bias")
                return y if bias is None else y + bias

            def split(name: str, x: np.ndarray, count: int, at: str = at) -> np.ndarray:
                y = project(f"self_attn.{name}_proj", x).reshape(len(x), count, size).swapaxes(0, 1)
                norm = w.get(f"{at}self_attn.{name}_norm.weight")
                y = y if norm is None else _rms(y, norm)
                if name == "v":
                    return y
                one, two = np.split(y, 2, axis=-1)
                cos, sin = np.cos(angles), np.sin(angles)
                return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

            x = _rms(h, w[f"{at}input_layernorm.weight"])
            q, k, v = split("q", x, heads), split("k", x, kv_heads), split("v", x, kv_heads)
            k, v = (np.repeat(y, heads // kv_heads, axis=0) for y in (k, v))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(size)
            scores = np.where(rows[None] <= np.array(last_seen)[:, None], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            h = h + project("self_attn.o_proj", (weights @ v).swapaxes(0, 1).reshape(len(x), -1))
            x = _rms(h, w[f"{at}post_attention_layernorm.weight"])
            gate = project("mlp.gate_proj", x)
            h = h + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", x))
        logits = _rms(h, w["model.norm.weight"]) @ w["lm_head.weight"].T
        logits[:, MASK] = -np.inf  # no token to say
        return logits  # type: ignore[no-any-return]

    def generate(self, prompt: Sequence[int], count: int, length: int, block: int, part: int, shift: bool) -> list[int]:
        """Decide canvases of `length` places one after another, the likeliest token of each confident place first.

        Args:
            block: text before the canvas is seen in blocks of so many rows; 1: causally.
        """
        text = list(prompt)
        while len(text) < len(prompt) + count:
            start = len(text) // block * block
            if shift and start == len(text):
                text.append(int(self._of(text, [], block)[-1].argmax()))
                continue
            canvas: list[int | None] = [*text[start:], *[None] * (length - len(text) + start)]
            step = 0
            while None in canvas:
                step += 1
                ids = [MASK if token is None else token for token in canvas]
                rows = self._of(text[:start], ids, block)[-length:]
                p = np.exp(rows - rows.max(axis=1, keepdims=True))
                p /= p.sum(axis=1, keepdims=True)
                first = canvas.index(None) // part
                places = [at for at, token in enumerate(canvas) if token is None and at // part == first]
                sure = {at: float(p[at - shift].max()) for at in places}
                chosen = [at for at in places if sure[at] >= (0.8 if step >= 8 else 0.95)]
                for at in chosen or [max(places, key=lambda at: sure[at])]:
                    canvas[at] = int(rows[at - shift].argmax())
            text = [*text[:start], *(token for token in canvas if token is not None)]
        return text[len(prompt) : len(prompt) + count]

    def _of(self, text: Sequence[int], canvas: Sequence[int], block: int) -> np.ndarray:
        rows = range(len(text))
        last = [min(row // block * block + block, len(text)) - 1 for row in rows]
        return self.logits([*text, *canvas], [*last, *[len(text) + len(canvas) - 1] * len(canvas)])


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight  # type: ignore[no-any-return]


def request(folder: Path, prompt: Sequence[int], count: int = N, **sampling: float) -> Request:
    decode = suit(Decode("canvas"), Cache(), describe(open_folder(folder)))
    return Request(tuple(prompt), count, Sampling(**sampling), decode)  # type: ignore[arg-type]


@types
@splits
async def test_canvases_hold_the_tokens_of_the_reference(
    name: str, layers: tuple[int, ...], folders: dict[str, Path], expected: Expected
) -> None:
    async with running(folders[name], layers) as chain:
        for length, tokens in expected(name).items():
            asked = request(folders[name], tokens_of(length))
            assert (await generate_once(chain, asked, chunk=CHUNK)).tokens == tokens


@configs
async def test_sampled_canvases_are_the_same_on_all_splits_and_in_lanes(name: str, folders: dict[str, Path]) -> None:
    requests = [
        request(folders[name], tokens_of(length, seed=length), 13, temperature=0.9, seed=length)
        for length in (3, 8, 13, 17)
    ]
    another = replace(requests[0], sampling=Sampling(seed=99, temperature=0.9))
    found = []
    for layers in SPLITS[::4]:
        async with running(folders[name], layers) as chain:
            alone = [each.tokens for each in await solo(chain, [*requests, another])]
            assert alone.pop() != alone[0], "another seed gives another text"
            found += [alone, [each.tokens for each in await together(chain, requests)]]
    assert all(each == found[0] for each in found)


def test_the_blocks_of_a_grid_make_a_difference(folders: dict[str, Path], expected: Expected) -> None:
    """The control of the comparison: a reference that sees text causally says something else."""
    assert expected("sdar")[16] != Numpy(folders["sdar"]).generate(tokens_of(16), N, 4, 1, 4, False)


@few
async def test_a_lost_worker_changes_no_canvas(name: str, folders: dict[str, Path]) -> None:
    asked = [
        request(folders[name], tokens_of(length, seed=length), 24, temperature=temperature, seed=length)
        for length, temperature in ((3, 0.0), (9, 0.8), (14, 0.8))
    ]
    async with running(folders[name], LAYERS) as chain:
        expected = [each.tokens for each in await solo(chain, asked)]
    async with supervised(folders[name], COMES_BACK) as rig, rig.engine() as engine:
        live = [Live(engine, each) for each in asked]
        await live[0].wait_pieces(1)
        await lose(rig, 1, comes_back=True)
        found = [await each.answer() for each in live]
        assert [each.tokens for each in found] == expected
        assert rig.cluster.num_recoveries == 1


async def test_the_trial_of_doctor_decodes_as_the_model_can(folders: dict[str, Path]) -> None:
    found = await try_cluster(cluster_options(None, str(folders["Fast_dLLM_Qwen"]), 1))
    assert found.first.tokens == found.second.tokens and len(found.first.tokens) == NUM_TOKENS


@pytest.mark.parametrize(
    ("name", "decode", "sampling", "message"),
    [
        ("sdar", Decode("ar"), {}, "decode: expected canvas, the one decoder that .* was trained for, got ar"),
        ("sdar", Decode("ngram"), {}, "decode: expected canvas"),
        ("Fast_dLLM_Qwen", Decode("diffusion"), {}, "decode: expected canvas"),
        ("sdar", Decode("canvas", canvas=8), {}, "canvas: expected 4 places, as .* was trained, got 8"),
        ("sdar", Decode("canvas", canvas_steps=5), {}, "canvas_steps: expected at most 4 for 4 places, got 5"),
        ("causal", Decode("canvas", canvas=7), {}, "canvas: expected from 1 to 6 places, .* got 7"),
        # what has no meaning for places that are decided together
        ("sdar", Decode("canvas"), {"logprobs": 2}, "logprobs: "),
        ("sdar", Decode("canvas"), {"presence_penalty": 1.0}, "presence_penalty: "),
        ("sdar", Decode("canvas"), {"dry_multiplier": 1.0}, "dry_multiplier: "),
        ("sdar", Decode("canvas"), {"min_tokens": 1}, "min_tokens: "),
        ("sdar", Decode("canvas"), {"logit_bias": {3: 1.0}}, "logit_bias: "),
        ("sdar", Decode("canvas"), {"grammar": Grammar(text="x")}, "decode: .* canvas cannot keep to a grammar"),
    ],
)
def test_what_a_model_was_not_trained_for_is_refused(
    name: str, decode: Decode, sampling: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    spec = describe(open_folder(folders[name]))
    with pytest.raises(InputError, match=message):
        check_request(Request((5, 6), N, Sampling(**sampling), suit(decode, Cache(), spec)), spec)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "sdar", "block_size": 1}, "block_size: expected a whole number from 2 to 512, found 1"),
        ({"model_type": "sdar", "block_size": True}, "block_size: "),
        ({"model_type": "Fast_dLLM_Qwen", "bd_size": "32"}, "bd_size: "),
        ({"canvas_length": 8}, "mask_token_id: expected the MASK token's id beside canvas_length, found none"),
        ({"model_type": "sdar"}, "mask_token_id: expected the MASK token's id beside block_size, found none"),
    ],
)
def test_an_impossible_training_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: {message}"):
        canvas_training_of({"model_type": "qwen3", **config}, 97, {})


@configs
async def test_kept_rows_are_reused_in_whole_blocks_with_equal_tokens(name: str, folders: dict[str, Path]) -> None:
    """A conversation that goes on, and another prompt whose beginning ends inside a block."""
    first = request(folders[name], tokens_of(41))
    grid = {"sdar": 4, "sdar_moe": 4, "Fast_dLLM_Qwen": 16, "causal": 1}[name]
    async with running(folders[name], (2, 2)) as chain:
        alone = (await generate_once(chain, first, chunk=CHUNK)).tokens
        prompts = (*first.prompt, *alone, 5, 6, 7), (*first.prompt[:39], 80, 81, 82)
        others = [replace(first, prompt=prompt) for prompt in prompts]
        expected = [each.tokens for each in await solo(chain, others)]
        async with Engine(chain) as engine:
            assert (await engine.answer(first)).tokens == alone
            found = [await engine.answer(each) for each in others]
    assert [each.tokens for each in found] == expected
    assert found[0].usage.num_reused >= 41 // grid * grid and found[0].usage.num_reused % grid == 0
    assert found[1].usage.num_reused == 39 // grid * grid


@types
async def test_a_chain_of_any_grid_warms_up_all_stages(name: str, folders: dict[str, Path], passes: list[Pass]) -> None:
    async with running(folders[name], (1, 3), is_measured=True):
        assert {each.start for each in passes} == {0, 1}
        rows = {each.rows for each in passes}
        assert len(rows) == 2 and all(count % describe(open_folder(folders[name])).canvas.grid == 0 for [count] in rows)  # type: ignore[union-attr]
