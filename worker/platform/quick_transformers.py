"""Records on disk what the model files of transformers export.

Without the record, transformers reads 1,600 files for it, twice per process: a quarter of a coordinator's start.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SCANNER = "transformers.utils.import_utils"

Exports = dict[frozenset[str], dict[str, set[str]]]  # packages that they need -> module -> names


class QuickTransformers:
    """Put first in `sys.meta_path`, has transformers look up on disk what its files export."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _SCANNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                if hasattr(module, "define_import_structure"):
                    module.define_import_structure = _kept(module.define_import_structure)

            loader.exec_module = exec_module
        return spec


def _kept(scan: Callable[..., Exports]) -> Callable[..., Exports]:
    """Return the function that scans a folder for the names that its files export, with its results kept."""

    def exports(module_path: str | Path, prefix: str | None = None) -> Exports:
        from worker.platform.installation import read_record, record_path, version_of, write_record

        folder = Path(module_path) if Path(module_path).is_dir() else Path(module_path).parent
        key = f"{version_of('transformers')} {folder} {folder.stat().st_mtime_ns} {prefix}"
        path = record_path("imports", key.encode())
        if record := read_record(path):
            return {frozenset(needed): {name: set(names) for name, names in own.items()} for needed, own in record}
        found = scan(module_path, prefix)
        write_record(path, [[sorted(k), {name: sorted(names) for name, names in v.items()}] for k, v in found.items()])
        return found

    return exports
