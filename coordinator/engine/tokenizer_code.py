"""Tokenizers that are Python code of the model's makers (Kimi's): which files, and whether they may run. Runs none."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from transformers.models.auto import tokenization_auto

from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint

# Model types whose checkpoints name code although one of transformers' own tokenizers is right for them.
_NEEDLESS: set[str] = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
_REFERENCE = re.compile(r"(?P<module>\w+)\.\w+")


def trusted_code(checkpoint: Checkpoint, *, is_trusted: bool) -> list[str]:
    """The files of Python that are the model's tokenizer; none where it is only data.

    Raises:
        ModelError: there is code, and it is not trusted; the message names it. Or it is another repository's.
    """
    code = _code_of(checkpoint)
    if code and not is_trusted:
        raise ModelError(
            f"the tokenizer of {checkpoint.name} is Python code: {', '.join(_place(checkpoint, f) for f in code)}\n"
            "Read it; then --trust-remote-code lets it run, with all that you may do yourself."
        )
    return code


def fetch_code(checkpoint: Checkpoint) -> None:
    """Bring what lacks of the tokenizer's code from the hub, in the state that the checkpoint's name stands for.

    Raises:
        ModelError: a file of it, or a package that it imports, is not there.
    """
    while lacking := [file for file in _code_of(checkpoint) if not (checkpoint.folder / file).exists()]:
        if checkpoint.download is None:
            raise ModelError(
                f"{checkpoint.folder} lacks {', '.join(lacking)}, the code of its tokenizer; copy it there"
            )
        checkpoint.download(lacking, lambda nbytes: None)
    imported = {name for file in _code_of(checkpoint) for name in get_imports(checkpoint.folder / file)}
    if absent := sorted(name for name in imported if find_spec(name) is None):
        raise ModelError(
            f"the tokenizer of {checkpoint.name} imports {', '.join(absent)}, not installed here; "
            f"run `pip install {' '.join(absent)}`"
        )


def _code_of(checkpoint: Checkpoint) -> list[str]:
    """The file that is named, and those it imports, if it is here. Code for the model itself does not count."""
    reference = _reference(checkpoint.folder)
    if reference is None or checkpoint.config.get("model_type") in _NEEDLESS:
        return []
    match = _REFERENCE.fullmatch(reference)
    if match is None:  # as owner/name--module.Class, which transformers would fetch in whatever state it is by then
        raise ModelError(
            f"the tokenizer of {checkpoint.name} is Python code that is not its own: {reference}\n"
            "Expected file.Class in tokenizer_config.json: copy the code into a folder of the model, and name it so."
        )
    return _with_imports(checkpoint.folder, f"{match['module']}.py")


def _reference(folder: Path) -> str | None:
    """What tokenizer_config.json names as the tokenizer's class, the fast one if there are two."""
    auto_map = _read(folder / "tokenizer_config.json").get("auto_map")
    found = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map  # in old files only a list
    slow_and_fast = found if isinstance(found, list) else [found]
    return next((str(reference) for reference in reversed(slow_and_fast) if reference), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads the tokenizer says what is wrong
        return {}
    return found if isinstance(found, dict) else {}


def _with_imports(folder: Path, file: str) -> list[str]:
    files = [file]
    for each in files:
        if (folder / each).exists():
            imported = (f"{module}.py" for module in sorted(get_relative_imports(folder / each)))
            files += [other for other in imported if other not in files]
    return files


def _place(checkpoint: Checkpoint, file: str) -> str:
    """Where to read it: it is not fetched before it is trusted."""
    if checkpoint.download is None or (checkpoint.folder / file).exists():
        return str(checkpoint.folder / file)
    repository, _, commit = checkpoint.name.partition("@")
    return f"{constants.ENDPOINT}/{repository}/blob/{commit}/{file}"
