"""Transformers is the same however it was imported. In processes of its own: this one has imported it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import builtins, json, sys
opened, real = set(), builtins.open
builtins.open = lambda file, *rest, **more: (opened.add(str(file)), real(file, *rest, **more))[1]
if {quick}:
    import worker
import transformers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

assert transformers.utils.import_utils and AutoTokenizer.register and LlamaTokenizer
names = sorted(dir(transformers)), sorted(dir(transformers.models)), sorted(tokenization_auto.TOKENIZER_MAPPING_NAMES)
print(json.dumps([names, sum("modeling_" in name for name in opened)]))
"""


def imported(cache: Path, *, quick: bool = True) -> tuple[list[list[str]], int]:
    """The names that transformers has, and how many of its models' files were read for them."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", SCRIPT.format(quick=quick)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    names: Any
    names, num_read = json.loads(done.stdout)
    return names, num_read


def test_its_names_are_kept_for_later_processes(tmp_path: Path) -> None:
    """A damaged record is as good as none: tests/unit/platform/test_installation.py."""
    whole, num_read = imported(tmp_path, quick=False)
    assert num_read > 100 and not [*tmp_path.rglob("*.msgpack")]
    assert imported(tmp_path) == (whole, num_read)
    assert imported(tmp_path) == (whole, 0)
