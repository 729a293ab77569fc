"""A tokenizer that is Python code, in the layout of Kimi's: a token per byte, and three that stand for no text."""

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

HERE = Path(__file__).parent
CODE, IMPORTED = "tokenization_bytes.py", "byte_ranks.py"
BOS, EOS, END = 256, 257, 258
_ENDS = {BOS: "[BOS]", EOS: "[EOS]", END: "<|im_end|>"}
_CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_code_tokenizer(folder: Path, **settings: Any) -> Path:
    """Put it in the place of what tokenizer the folder has, with these keys in tokenizer_config.json."""
    (folder / "tokenizer.json").unlink(missing_ok=True)
    for file in (CODE, IMPORTED):
        shutil.copy(HERE / file, folder / file)
    ranks = [b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    (folder / "tiktoken.model").write_bytes(b"".join(ranks))
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_bytes.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "added_tokens_decoder": {str(i): {"content": text, "special": True} for i, text in _ENDS.items()},
        "chat_template": _CHAT, **settings,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_model_code(folder: Path) -> None:
    """Code of the model itself, as many new checkpoints have it: whoever runs it ends."""
    for file in ("configuration_new.py", "modeling_new.py"):
        (folder / file).write_text("raise SystemExit('the code of the model itself was run')\n")


@contextmanager
def code_kept_in(folder: Path) -> Iterator[None]:
    """Copies that transformers makes of code go into this folder, and nothing of it stays imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]
