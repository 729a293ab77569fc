"""Record what mlx-vlm 0.7.10 makes of a tiny random DiffusionGemma: python -m tools.record_diffusion_gemma FOLDER

tests/integration/test_diffusion_gemma.py compares with tests/fixtures/diffusion_gemma, so mlx-vlm is needed only here:
install it without its dependencies (`pip install --no-deps --target mlx-vlm-only mlx-vlm==0.7.10`). Its image code is
left out. The folder gets:

* config.json, generation_config.json, model.safetensors: the model in the Hugging Face layout, float32, with a tensor
  of a vision tower
* logits.safetensors: by prompt length, first, soft, second [T, V]: of a canvas after the prompt, of another canvas that
  begins with what the first made of its places, and of a third one once the second is read as text; embedded [T, D] is
  what the first made
* runs.json: the canvases and prompts of these, and whole answers: prompt, sampler, steps, eos, tokens, reason, forwards

Noise is drawn as Brigade draws it. Each recorded choice has a margin: logits off by 1e-4 give the same answers.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import mlx.core as mx
import typer
from mlx.utils import tree_flatten, tree_map

from coordinator.decoding.decoders import random_token
from worker.errors import InputError
from worker.platform.run import run_command

V, T, WINDOW, SEED = 97, 16, 16, 7
PROMPTS = (5, 14, 15, 16, 40)
_NOISE = 1e-4  # on logits, that changes no recorded answer
_PARENTS = "models models.diffusion_gemma models.gemma4 models.qwen3_vl generate"
_TEXT: dict[str, Any] = {
    "model_type": "diffusion_gemma_text", "vocab_size": V, "hidden_size": 48, "intermediate_size": 16,
    "moe_intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_experts": 8,
    "top_k_experts": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}  # fmt: skip
_CONFIG = {
    "model_type": "diffusion_gemma", "text_config": _TEXT, "canvas_length": T, "image_token_id": 94, "boi_token_id": 95,
    "eoi_token_id": 96,
}  # fmt: skip
_GENERATION = {
    "max_denoising_steps": 12,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "linear_temperature_schedule_config": {"t_min": 0.4, "t_max": 0.8},
    "diffusion_stopping_config": {"stability_threshold": 1, "confidence_threshold": 0.1},
}
# prompt length, sampler, threshold (of confidence), most steps, most tokens, place of the end among the tokens
_RUNS: tuple[tuple[int, str, float, int, int, int | None], ...] = (
    (20, "confidence", 0.9, 12, 40, None),
    (5, "entropy", 0.0, 12, 40, None),
    (17, "entropy", 0.0, 3, 32, None),
    (12, "confidence", 0.5, 12, 48, 21),
    (3, "entropy", 0.0, 12, 48, 7),
)


def main(
    folder: Annotated[Path, typer.Argument(help="Where the recording goes.")],
    mlx_vlm: Annotated[Path, typer.Option(help="The folder that mlx-vlm is installed in.")],
) -> None:
    """Record a tiny DiffusionGemma of mlx-vlm."""
    if not (mlx_vlm / "mlx_vlm").is_dir():
        raise InputError("mlx_vlm", f"expected the folder that mlx-vlm is installed in, got {mlx_vlm}")
    _import_parts(mlx_vlm)
    seed = next(seed for seed in range(100) if record(folder, seed))
    print(f"seed {seed}, {sum(file.stat().st_size for file in folder.iterdir())} bytes")


def record(folder: Path, seed: int) -> bool:
    """Write the recording. Return False, with nothing written, if rounding might change an answer."""
    mx.random.seed(seed)
    model, weights = _make_model()
    runs = []
    for length, sampler, threshold, steps, count, place in _RUNS:
        prompt = tokens_of(length)
        ask: dict[str, Any] = {"sampler": sampler, "threshold": threshold, "steps": steps, "max_tokens": count}
        found = _generate(model, prompt, eos=[], **ask)
        eos = [] if place is None else [found["tokens"][place]]
        found = _generate(model, prompt, eos=eos, **ask)
        for noise_seed in range(3):
            if _generate(model, prompt, eos=eos, noise_seed=noise_seed, **ask) != found:
                return False
        runs.append({"prompt": prompt, **ask, "eos": eos, **found})
    canvases = [tokens_of(T, number) for number in (11, 29, 50)]
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    mx.save_safetensors(str(folder / "logits.safetensors"), _logits(model, canvases))
    about = {"seed": SEED, "canvases": canvases, "runs": runs}
    for name, content in ("config", _CONFIG), ("generation_config", _GENERATION), ("runs", about):
        (folder / f"{name}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    return True


def tokens_of(length: int, first: int = 0) -> list[int]:
    return [(7 * number + 3 + first) % 93 for number in range(length)]


def import_bare(folder: Path, packages: str) -> None:
    """Make packages of mlx-vlm importable without their own imports, which want all of its dependencies."""
    sys.path.insert(0, str(folder))
    for name in ("mlx_vlm", *(f"mlx_vlm.{package}" for package in packages.split())):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")))]


def _import_parts(folder: Path) -> None:
    import_bare(folder, _PARENTS)

    class Stub(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    unused = "models.gemma4.vision models.gemma4.gemma4 models.gemma4.speculative_verifier tokenizer_utils"
    for name in ("PIL", "PIL.Image", *(f"mlx_vlm.{each}" for each in unused.split())):
        sys.modules.setdefault(name, Stub(name))


def _make_model() -> tuple[Any, dict[str, mx.array]]:
    """Return mlx-vlm's model with random weights, and these by their names in published files."""
    code = importlib.import_module("mlx_vlm.models.diffusion_gemma.diffusion_gemma")
    config = importlib.import_module("mlx_vlm.models.diffusion_gemma.config").ModelConfig.from_dict(_CONFIG)
    config.generation_config = _GENERATION
    model = code.Model(config)

    def randomised(parameter: mx.array) -> mx.array:
        if parameter.ndim < 2:
            return parameter + 0.1 * mx.random.normal(parameter.shape)
        return mx.random.normal(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5)

    model.update(tree_map(randomised, model.parameters()))
    named: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    for name in named:  # or the model would never be sure of anything, and every step would turn all upside down
        if name.endswith("embed_tokens.weight"):
            named[name] = named[name] * 3
        elif ".post_" in name:
            named[name] = named[name] * 0.45
    model.load_weights(list(named.items()))
    mx.eval(model.parameters())
    weights = {
        name.removesuffix(".weight") if name.endswith("_proj.weight") and ".experts." in name else name: array
        for name, array in named.items()
    }
    return model, {**weights, "model.encoder.vision_tower.patch.weight": mx.zeros((2, 2))}


def _logits(model: Any, canvases: list[list[int]]) -> dict[str, mx.array]:
    first, second, third = (mx.array([canvas]) for canvas in canvases)
    found: dict[str, mx.array] = {}
    for length in PROMPTS:
        _, cache = model.model.encoder(mx.array([tokens_of(length)]))
        logits = model.diffusion_decoder_logits(first, cache=cache)
        soft = model.diffusion_self_conditioning(logits / 0.8, model.diffusion_prepare_self_conditioning())
        later = model.diffusion_decoder_logits(second, cache=cache, self_conditioning=soft)
        cache = model.diffusion_update_cache(second, cache=cache)
        last = model.diffusion_decoder_logits(third, cache=cache)
        found |= {f"{length}.first": logits[0], f"{length}.embedded": soft[0]}
        found |= {f"{length}.soft": later[0], f"{length}.second": last[0]}
    return found


def _generate(
    model: Any,
    prompt: list[int],
    *,
    sampler: str,
    threshold: float,
    steps: int,
    max_tokens: int,
    eos: list[int],
    noise_seed: int | None = None,
) -> dict[str, Any]:
    """Return the tokens, the reason of the end and the number of forwards of mlx-vlm's own loop, greedy."""
    code: Any = importlib.import_module("mlx_vlm.generate.diffusion")
    at = SimpleNamespace(start=0, step=0)

    def noise(length: int) -> mx.array:
        return mx.array([[random_token(SEED, at.start + place, at.step, V) for place in range(length)]])

    def initial(decoder_input_ids: None, num_generated: int, batch: int, length: int, *rest: Any) -> mx.array:
        at.start, at.step = len(prompt) + num_generated, 0
        return noise(length)

    def fresh(batch: int, length: int, *rest: Any) -> mx.array:
        at.step += 1
        return noise(length)

    code._diffusion_initial_canvas, code._diffusion_initialize_canvas = initial, fresh
    code.make_streaming_detokenizer = lambda processor: SimpleNamespace(
        add_token=lambda *args, **kwargs: None, finalize=lambda: None, last_segment=""
    )
    exact: Callable[..., mx.array] = type(model).diffusion_decoder_logits
    key = mx.random.key(noise_seed or 0)

    def disturbed(*args: Any, **kwargs: Any) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        logits = exact(model, *args, **kwargs)
        return logits if noise_seed is None else logits + _NOISE * mx.random.normal(logits.shape, key=own)

    object.__setattr__(model, "diffusion_decoder_logits", disturbed)

    class Ends:
        def add_eos_token_ids(self, ids: Any) -> None: ...

        def __call__(self, token: int) -> bool:
            return token in eos

    results = list(
        code.stream_diffusion_generate(
            *(model, None, SimpleNamespace(stopping_criteria=Ends()), mx.array([prompt]), None, None),
            max_tokens=max_tokens,
            skip_special_token_ids=[],
            temperature=0.0,
            max_denoising_steps=steps,
            diffusion_full_canvas=True,
            diffusion_sampler={"entropy": "entropy-bound", "confidence": "confidence-threshold"}[sampler],
            diffusion_threshold=threshold,
        )
    )
    object.__delattr__(model, "diffusion_decoder_logits")
    tokens = [result.token for result in results[:-1] if not result.diffusion_block_complete]
    last = results[-1]
    if last.finish_reason == "stop":
        tokens.append(last.token)
    return {"tokens": tokens, "reason": last.finish_reason, "forwards": last.diffusion_denoising_steps}


if __name__ == "__main__":
    run_command(main)
