"""Record what mlx-vlm's drafters draft: tiny random drafter folders, their inputs, and the drafts with their logits.

python -m tools.record_drafters tests/fixtures/drafters --mlx-vlm FOLDER [NAME ...]

mlx-vlm is no dependency of this project: `pip install --no-deps --target FOLDER mlx-vlm==0.7.10`. Its drafter modules
are imported without the rest of the package. Each recording is a folder with

* config.json and model.safetensors: the drafter as published, in its real layout, with random fp32 weights
* drafts.safetensors: target.embed_tokens.weight [V, D], target.lm_head.weight [V, D] where the drafter uses it, and of
  step s: features.s [n, C] (the rows of the target that the step adds; C = D, or D times the tapped layers) and
  logits.s.k [k, V of the drafter] (MTP and EAGLE-3: of the largest k only, the first rows are those of a smaller k)
* drafts.json: the kind, embed_scale, and of each step: base (target rows before it), tokens (n + 1 ids from position
  base on; the last is the bonus token, whose row is not known yet) and drafts by k

The first tokens of a later step are the bonus token and accepted drafts of the step before. mlx-vlm's MTP keeps the
cache rows of accepted drafts that it made from its own hidden states; here they are made again from the target's, as
a drafter that reads all tokens anew would make them. shortcut.1 [k, V] has the logits that mlx-vlm's own way gives.
"""

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import typer
from mlx.utils import tree_flatten

from tools.record_diffusion_gemma import import_bare
from worker.errors import InputError
from worker.platform.run import run_command

D, V, DRAFT_V, MASK = 32, 128, 64, 5
LENGTHS = (1, 3, 7)
MARGIN = 1e-2  # between the two best logits of every draft, so that rounding changes no draft
_PARENTS = "models models.qwen3_5 models.qwen3_5_moe models.qwen3_vl speculative speculative.drafters"
Weights = dict[str, mx.array]

_SIZES = {
    "hidden_size": D, "intermediate_size": 32, "vocab_size": V, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 10000.0,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_SIZES, "num_hidden_layers": 4, "full_attention_interval": 4, "mtp_num_hidden_layers": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
_DENSE = {**_QWEN, "model_type": "qwen3_5_text", "rope_parameters": _ROPE}
_TIED = {"model_type": "qwen3_5_mtp", "text_config": {**_DENSE, "tie_word_embeddings": True}, "block_size": 3}
_EXPERTS = {
    "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
_BLOCK = {"target_layer_ids": [1, 3, 5], "mask_token_id": MASK}
_DFLASH = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **_SIZES, "num_hidden_layers": 2, "block_size": 8,
    "num_target_layers": 8, "dflash_config": _BLOCK, "rope_scaling": None,
}  # fmt: skip
_SLIDING = {**_DFLASH, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_LLAMA = {"model_type": "llama", **_SIZES, "attention_bias": False, "num_hidden_layers": 1}
_FLAT = {"architectures": ["LlamaForCausalLMEagle3"], **_LLAMA, "draft_vocab_size": DRAFT_V}
_NESTED = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": _LLAMA,
    "draft_vocab_size": DRAFT_V, "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
}  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """One drafter and the steps that are recorded of it."""

    module: str
    config: dict[str, Any]
    layout: str = ""  # mtp (inside a checkpoint, norms minus one), mtp fused (experts in one tensor), midlayer
    steps: tuple[int, ...] = (6, 2, 0)  # tokens of the prompt, then accepted drafts of the step before
    tied: bool = False
    bits: int | None = None
    width: int = D  # the target's hidden size; another than D: the drafter has an embedding of its own
    embed_scale: float = 1.0


RECORDINGS = {
    "mtp_qwen3_5": Recording("qwen3_5_mtp", {"model_type": "qwen3_5", "text_config": _DENSE}, "mtp"),
    "mtp_sidecar": Recording("qwen3_5_mtp", _TIED, tied=True),
    "mtp_sidecar_4bit": Recording(
        "qwen3_5_mtp", {**_TIED, "quantization": {"group_size": 32, "bits": 4, "mode": "affine"}}, tied=True, bits=4
    ),
    "mtp_qwen3_5_moe": Recording(
        "qwen3_5_mtp", {"model_type": "qwen3_5_moe", "text_config": {**_DENSE, **_EXPERTS}}, "mtp fused"
    ),
    "mtp_qwen3_next": Recording("qwen3_5_mtp", {**_QWEN, **_EXPERTS, "model_type": "qwen3_next"}, "mtp"),
    "dflash": Recording("qwen3_dflash", _DFLASH),
    # later steps add one row each: after more, mlx-vlm shows more context than the sliding window has
    "dflash_sliding": Recording(
        "qwen3_dflash", {**_SLIDING, "final_logit_softcapping": 4.0}, steps=(12, 0, 0), tied=True, embed_scale=D**0.5
    ),
    "dflash_causal": Recording(
        "qwen3_dflash", {**_SLIDING, "dflash_config": {**_BLOCK, "causal": True}, "rope_parameters": _YARN},
        steps=(12, 2, 1), tied=True,
    ),
    "eagle3": Recording("eagle3", _FLAT, "midlayer"),
    "eagle3_norm_before_residual": Recording(
        "eagle3", {**_NESTED, "norm_before_residual": True, "target_hidden_size": 48}, width=48
    ),
    "eagle3_norm_before_fc": Recording("eagle3", {**_NESTED, "norm_before_fc": True, "draft_vocab_size": V}),
}  # fmt: skip


def main(
    folder: Annotated[Path | None, typer.Argument(help="Where the recordings go.")] = None,
    names: Annotated[list[str] | None, typer.Argument(help="Which ones; all if none is given.")] = None,
    mlx_vlm: Annotated[Path | None, typer.Option(help="The folder that mlx-vlm is installed in.")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the recordings.")] = False,
) -> None:
    """Record drafters of mlx-vlm."""
    if only_list:
        print("\n".join(RECORDINGS))
        return
    if folder is None or mlx_vlm is None or not (mlx_vlm / "mlx_vlm").is_dir() or set(names or ()) - RECORDINGS.keys():
        raise InputError("", "expected a folder, --mlx-vlm with the folder of mlx-vlm, and names that --list lists")
    import_bare(mlx_vlm, _PARENTS)
    for name in ("PIL", "PIL.Image"):
        sys.modules.setdefault(name, ModuleType(name))
    for name in names or RECORDINGS:
        seed = next(seed for seed in range(100) if record(RECORDINGS[name], folder / name, seed))
        print(f"{name}: seed {seed}, {sum(file.stat().st_size for file in (folder / name).iterdir())} bytes")


def record(recording: Recording, folder: Path, seed: int) -> bool:
    """Write a recording. Return False, with nothing written, if the two best logits of a draft are too near."""
    mx.random.seed(seed)
    weights = _publish(recording, _model(recording))
    arrays = {"target.embed_tokens.weight": mx.random.normal((V, recording.width))}
    if not recording.tied and recording.module != "eagle3":
        arrays["target.lm_head.weight"] = mx.random.normal((V, D)) * 2 * D**-0.5
    drafter = _Drafter(recording, weights, arrays)
    taps = 1 if recording.module == "qwen3_5_mtp" else 3
    steps: list[dict[str, Any]] = []
    features: list[mx.array] = []
    for number, count in enumerate(recording.steps):
        if steps:
            known = [steps[-1]["tokens"][-1], *steps[-1]["drafts"][LENGTHS[-1]][:count]]
        else:
            known = [mx.random.randint(MASK + 1, V, ()).item() for _ in range(count)]
        tokens = [*known, mx.random.randint(MASK + 1, V, ()).item()]
        base = sum(len(rows) for rows in features)
        features.append(mx.random.normal((len(known), recording.width * taps)))
        drafts, logits = drafter.step(features[-1], tokens)
        best = mx.sort(mx.concatenate(list(logits.values())), axis=-1)
        if mx.any(best[:, -1] - best[:, -2] < MARGIN):
            return False
        steps.append({"base": base, "tokens": tokens, "drafts": drafts})
        arrays[f"features.{number}"] = features[-1]
        arrays |= {f"logits.{number}.{k}": rows for k, rows in logits.items()}
    every = [token for step in steps for token in step["tokens"][:-1]] + tokens[-1:]
    if recording.module != "qwen3_dflash":
        rows = _Drafter(recording, weights, arrays).step(mx.concatenate(features), every)[1][LENGTHS[-1]]
        assert mx.allclose(rows, logits[LENGTHS[-1]], atol=1e-4), "a drafter that reads all tokens anew differs"
    if recording.module == "qwen3_5_mtp":
        shortcut = _Drafter(recording, weights, arrays, keeps_own_rows=True)
        for number in range(2):
            arrays["shortcut.1"] = shortcut.step(features[number], steps[number]["tokens"])[1][LENGTHS[-1]]
    folder.mkdir(parents=True, exist_ok=True)
    origin = "mlx" if recording.config.get("model_type") == "qwen3_5_mtp" else "pt"
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": origin})
    mx.save_safetensors(str(folder / "drafts.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(recording.config, indent=1) + "\n", encoding="utf-8")
    about = {"kind": recording.module, "embed_scale": recording.embed_scale, "steps": steps}
    (folder / "drafts.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return True


def _model(recording: Recording) -> Any:
    """Return mlx-vlm's drafter, without weights. mlx-vlm reads heads of checkpoints and flat EAGLE-3 only if nested."""
    config = json.loads(json.dumps(recording.config))  # a copy: mlx-vlm changes it
    if recording.layout.startswith("mtp"):
        text = config.get("text_config", config)
        config = {"model_type": "qwen3_5_mtp", "text_config": {"rope_parameters": dict(_ROPE), **text}}
    elif recording.layout == "midlayer":
        config = {**config, "model_type": "eagle3", "transformer_layer_config": config}
    module = importlib.import_module(f"mlx_vlm.speculative.drafters.{recording.module}")
    return module.Model(module.ModelConfig.from_dict(config))


def _publish(recording: Recording, model: Any) -> Weights:
    """Return random weights under the names, and in the form, that published files have."""
    weights: Weights = {}
    inside = recording.layout.startswith("mtp")
    parameters: Weights = dict(tree_flatten(model.parameters()))
    for name, array in parameters.items():
        if name == "d2t":
            drafted = mx.sort(mx.random.permutation(V)[:DRAFT_V])
            weights["d2t"] = (drafted - mx.arange(DRAFT_V)).astype(mx.int64)
            weights["t2d"] = mx.any(mx.arange(V)[:, None] == drafted, axis=1)
            continue
        if array.ndim == 1:
            value = 0.2 * mx.random.normal(array.shape) + (0 if inside else 1)
        else:
            value = mx.random.normal(array.shape) * (1 if "embed" in name else 1.5 * array.shape[-1] ** -0.5)
        name = f"mtp.{name}" if inside else name
        if recording.layout == "midlayer":
            name = name.replace("layers.0.", "midlayer.")
        if "switch_mlp" in name and recording.layout == "mtp":
            weights |= {name.replace("switch_mlp", f"experts.{number}"): each for number, each in enumerate(value)}
        elif recording.bits and array.ndim == 2:
            for part, each in zip(("weight", "scales", "biases"), mx.quantize(value, 32, recording.bits), strict=True):
                weights[name.replace("weight", part)] = each
        elif name != "embed_tokens.weight" or recording.width != D:
            weights[name] = value
    if recording.layout == "mtp fused":
        old, new = "mtp.layers.0.mlp.switch_mlp", "mtp.layers.0.mlp.experts"
        gate_up = [weights.pop(f"{old}.{part}_proj.weight") for part in ("gate", "up")]
        weights[f"{new}.gate_up_proj"] = mx.concatenate(gate_up, axis=1)
        weights[f"{new}.down_proj"] = weights.pop(f"{old}.down_proj.weight")
    return weights


class _Drafter:
    """A drafter of mlx-vlm, bound to the recorded parts of a target; greedy."""

    def __init__(self, recording: Recording, weights: Weights, target: Weights, keeps_own_rows: bool = False) -> None:
        self.model = _model(recording)
        loaded = self.model.sanitize({name.replace("midlayer.", "layers.0."): each for name, each in weights.items()})
        embedding = nn.Embedding(V, recording.width)
        embedding.weight = target["target.embed_tokens.weight"]
        if recording.module == "eagle3":
            loaded.setdefault("embed_tokens.weight", embedding.weight)
        if recording.bits:
            nn.quantize(self.model, 32, recording.bits, class_predicate=lambda path, _: f"{path}.scales" in loaded)
        self.model.load_weights(list(loaded.items()))
        head = target.get("target.lm_head.weight", embedding.weight)
        self.target = SimpleNamespace(
            embed_tokens=embedding, embed_scale=recording.embed_scale, lm_head=lambda hidden: hidden @ head.T
        )
        self.model.reset(self.target)
        self.caches = {k: self.model.make_cache() for k in LENGTHS} if recording.module == "qwen3_dflash" else {}
        self.keeps_own_rows = keeps_own_rows
        self.drafts: mx.array | None = None
        self.seen: list[mx.array] = []

    def step(self, features: mx.array, tokens: list[int]) -> tuple[dict[int, list[int]], dict[int, mx.array]]:
        """Add the rows of all tokens but the last, and return drafts that continue the last, and logits, by k."""
        if self.caches:
            return self._blocks(features, tokens[-1])
        self.seen = []
        if self.drafts is None:
            self.model.prefill_from_target_hidden(mx.array([tokens[:-1]]), features[None], tokens[-1], self._choose)
        else:
            if not self.keeps_own_rows:
                for cache in self.model._cache:
                    cache.trim(self.model._round_appended)
                self.model._next_position -= self.model._round_appended
                self.model._round_appended = 0
            accepted = tokens[1:-1]
            assert self.drafts[0, : len(accepted)].tolist() == accepted
            self.model.accept_verified_tokens(features[None], self.drafts, len(accepted), tokens[1:], self._choose)
        k = LENGTHS[-1]
        self.drafts = self.model.draft_block(tokens[-1], None, None, k + 1, self._choose)
        ids: Any = self.drafts[0].tolist()
        return {some: ids[:some] for some in LENGTHS}, {k: mx.concatenate(self.seen)}

    def _blocks(self, features: mx.array, bonus: int) -> tuple[dict[int, list[int]], dict[int, mx.array]]:
        drafts, logits = {}, {}
        for k, cache in self.caches.items():
            drafts[k] = self.model.draft_block(bonus, features[None], cache, k + 1, self._choose)[0].tolist()
            logits[k] = self.seen[-1]
        return drafts, logits

    def _choose(self, logits: mx.array) -> mx.array:
        self.seen.append(logits[0])
        return mx.argmax(logits, axis=-1)


if __name__ == "__main__":
    run_command(main)
