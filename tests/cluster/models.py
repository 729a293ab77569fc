"""Model folders for whole processes: random ones that have a tokenizer, one that recites, altered copies."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tiny import change_json, make_model, write_folder
from tools.random_model import write_diffusion_gemma

VOCAB = 320
CONTEXT = 40_000  # tokens: room for requests that last until a test ends them
EOS, END = 1, 2
_GEMMA = Path(__file__).parents[1] / "fixtures" / "diffusion_gemma"
_SPECIAL = ["<pad>", "<eos>", "<end>"]
_TEXT = [
    "the quick brown fox jumps over the lazy dog. " * 5,
    "Zürich, naïve, 日本語, 😀 and one two three four five",
] * 3
_CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_talker(folder: Path, **config: Any) -> Path:
    """A random model of four layers whose tokens are bytes and a few words, with these keys in its configuration."""
    make_model(folder, config={"vocab_size": VOCAB, "max_position_embeddings": CONTEXT} | config)
    _write_tokenizer(folder)
    return folder


def make_refiner(folder: Path) -> Path:
    """A random DiffusionGemma in the layout of mlx-community, with the tokenizer of `make_talker`."""
    config = json.loads((_GEMMA / "config.json").read_text())
    config |= {"image_token_id": VOCAB - 3, "boi_token_id": VOCAB - 2, "eoi_token_id": VOCAB - 1}
    config["text_config"] |= {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    config["text_config"] |= {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
    write_diffusion_gemma(folder, config, is_dense_quantised=False)
    _write_tokenizer(folder)
    return folder


def make_reciter(folder: Path, text: str) -> Path:
    """A model that says `text` over and over, a token per byte, after any prompt in its chat template.

    Its layers add nothing and its head maps each byte's embedding to the byte that follows, so no byte may occur
    twice. The template's last space starts the text.
    """
    make_talker(folder)
    weights: dict[str, Any] = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    ids = [_byte_ids(folder)[byte] for byte in text.encode()]
    assert len(set(ids)) == len(ids) and " " not in text, "each byte once, and none is the prompt's last"
    directions = np.random.default_rng(0).normal(size=(VOCAB, 64)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    head = np.zeros_like(directions)
    for now, after in zip(ids, [*ids[1:], ids[0]], strict=True):
        head[after] += 10 * directions[now]
    head[ids[0]] += 10 * directions[_byte_ids(folder)[ord(" ")]]  # the chat template ends in a space
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(weight)
    weights |= {"model.embed_tokens.weight": mx.array(directions), "lm_head.weight": mx.array(head)}
    weights["model.norm.weight"] = mx.ones((64,))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def altered_copy(model: Path, folder: Path, change: Callable[[dict[str, mx.array]], None]) -> Path:
    """A copy of `model` after `change` to its tensors."""
    shutil.copytree(model, folder)
    weights: dict[str, Any] = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    change(weights)
    write_folder(folder, json.loads((folder / "config.json").read_text()), weights)
    return folder


def reconfigured_copy(model: Path, folder: Path, file: str = "config.json", **keys: Any) -> Path:
    """A copy of `model` with these keys in one of its files."""
    shutil.copytree(model, folder)
    change_json(folder / file, **keys)
    return folder


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False, "chat_template": _CHAT,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_ids(folder: Path) -> dict[int, int]:
    """The token of each single byte: GPT-2's alphabet gives printable bytes to themselves, the others from 256 on."""
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {byte: vocabulary[letter] for byte, letter in letters.items()}
