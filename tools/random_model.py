"""A model of any size with random weights, in the real folder layout: for measuring speed where weights do not matter.

python -m tools.random_model FOLDER [--hidden 256] [--layers 8] [--dtype bfloat16] [--bits 4] [--drafter FOLDER]

With `--chats` it has the bundled model's tokenizer, a chat template with tools, and short answers: for clients.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import typer
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from mlx_lm.utils import make_shards
from tokenizers import Tokenizer

from worker.errors import InputError
from worker.model.checkpoint import DEMO
from worker.model.diffusion_gemma import Model, ModelArgs
from worker.platform.run import run_command

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
_GROUP = 64
_HEAD = 64
_EXPERT_GROUP = 32
_SHARD_GIB = 4
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% set tool_call = call.function %}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Logits of tokens that end something, where those of all others are about 0; and what they become after a quotation
# mark. A text takes some 10 tokens; the likeliest one is a single mark, and the likeliest value of JSON "a".
_ENDS = {"<|im_end|>": 4.5, '"': 6.0, "}": 5.0, "]": 5.0}
_AFTER_MARK = {"<|im_end|>": 8.0, "a": 8.0}


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write it; must not exist yet.")],
    hidden: Annotated[int, typer.Option(min=64, help="Hidden size, which heads of 64 numbers share.")] = 256,
    layers: Annotated[int, typer.Option(min=1)] = 8,
    vocab: Annotated[int, typer.Option(min=2)] = 2048,
    context: Annotated[int, typer.Option(min=1, help="The longest sequence, tokens.")] = 16384,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    bits: Annotated[int | None, typer.Option(help="Quantise to 4 or 8 bits.")] = None,
    chats: Annotated[
        bool, typer.Option("--chats", help="Add a tokenizer of 2,048 tokens and a chat template.")
    ] = False,
    drafter: Annotated[Path | None, typer.Option(help="Write a drafter there whose drafts all hold.")] = None,
) -> None:
    """Write a qwen3 model of random weights."""
    if chats:
        vocab = Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab_size()
    heads = hidden // _HEAD
    kv_heads = heads if heads % 2 else heads // 2
    if dtype not in _DTYPES or folder.exists() or hidden % _HEAD or bits not in (None, 4, 8):
        raise InputError(
            "",
            f"expected a folder that does not exist, --hidden with a multiple of {_HEAD}, --dtype float32 or bfloat16, "
            "and --bits 4 or 8 if any",
        )
    config = {
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 3 * hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": _HEAD, "rms_norm_eps": 1e-6,
        "vocab_size": vocab, "rope_theta": 1e6, "max_position_embeddings": context, "tie_word_embeddings": not chats,
        "eos_token_id": 0,
    }  # fmt: skip
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.update(tree_map(lambda array: _small(array).astype(_DTYPES[dtype]), model.parameters()))
    if chats:
        _shorten_answers(model, hidden)
    if drafter:  # its only layer is the model's first one; all others add nothing to what that makes
        for layer in model.layers[1:]:
            for part in layer.self_attn.o_proj, layer.mlp.down_proj:
                part.weight = mx.zeros_like(part.weight)
        every = dict(tree_flatten(model.parameters()))
        first = {name: array for name, array in every.items() if "layers" not in name or ".layers.0." in name}
        _write(drafter, {**config, "num_hidden_layers": 1}, first)
    if bits:
        nn.quantize(model, group_size=_GROUP, bits=bits)
        config["quantization"] = {"group_size": _GROUP, "bits": bits}
    _write(folder, config, dict(tree_flatten(model.parameters())))
    for each in filter(None, (folder, drafter)) if chats else ():
        add_tokenizer(each, TEMPLATE, context)


def add_tokenizer(folder: Path, template: str, context: int) -> None:
    """Give a model of 2,048 tokens the bundled one's tokenizer, with a chat template."""
    settings = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"chat_template": template, "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": [2, 0]}))
    shutil.copy(DEMO / "tokenizer.json", folder)


def _shorten_answers(model: qwen3.Model, hidden: int) -> None:
    """Give tokens their logits by two numbers of hidden states that no layer changes: a constant, and a mark's."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding[:, 0], embedding[:, 1], head[:, :2] = 100.0, 0.0, 0.0  # far above all others: the norm leaves only these
    embedding[tokenizer.token_to_id('"'), 1] = 100.0
    for layer in model.layers:
        for part in layer.self_attn.o_proj, layer.mlp.down_proj:
            part.weight[:2] = 0.0
    for place, logits in enumerate((_ENDS, _AFTER_MARK)):
        for text, logit in logits.items():
            head[tokenizer.token_to_id(text), place] = logit / hidden**0.5


def write_diffusion_gemma(
    folder: Path, config: dict[str, Any], seed: int = 0, *, is_dense_quantised: bool = True
) -> None:
    """Write a DiffusionGemma of random weights in the layout of mlx-community.

    Experts are in 4 bits, gate and up in one tensor, and all other matrices in 8 bits, if these are to be quantised:
    on a CPU that is many times slower. `config` goes to config.json.
    """
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    for name, parameter in dict(tree_flatten(model.parameters())).items():
        noise = mx.random.normal(parameter.shape)
        array = (noise * noise.shape[-1] ** -0.5 if noise.ndim > 1 else 1 + 0.1 * noise).astype(mx.bfloat16)
        name = name.replace("model.embed_tokens.conditioning.", "model.self_conditioning.")
        name = name.replace("embed_tokens.table.", "embed_tokens.").replace("model.", "model.decoder.", 1)
        if name.endswith(".role_scalars"):
            for number, part in enumerate(("encoder.language_model", "decoder")):
                scalar = name.replace("decoder", part, 1).replace("role_scalars", "layer_scalar")
                weights[scalar] = array[number : number + 1]
        elif array.ndim > 1 and (is_dense_quantised or ".experts." in name):
            parts = mx.quantize(array, _EXPERT_GROUP, 4 if ".experts." in name else 8)
            mx.eval(parts)
            for part, each in zip(("weight", "scales", "biases"), parts, strict=True):
                weights[name.replace("switch_glu.", "").replace("weight", part)] = each
        else:
            weights[name] = array
    for name in [name for name in weights if ".experts.gate_proj." in name]:
        up = weights.pop(name.replace("gate_proj", "up_proj"))
        weights[name.replace("gate_proj", "gate_up_proj")] = mx.concatenate([weights.pop(name), up], axis=-2)
    quantization = {"group_size": _EXPERT_GROUP, "bits": 4, "mode": "affine"}
    _write(folder, {**config, "quantization": quantization}, weights)


def _small(array: mx.array) -> mx.array:
    """Of a size that keeps activations finite through any number of layers."""
    return array if array.ndim < 2 else mx.random.normal(array.shape) * array.shape[-1] ** -0.5


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """The configuration, and tensors in files of a few GiB with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    files = make_shards(weights, _SHARD_GIB)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    run_command(main)
