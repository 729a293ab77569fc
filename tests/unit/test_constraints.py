"""CI installs the versions that were tested: no new version of a package can break it from one day to the next."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_every_requirement_is_pinned_to_a_version_that_it_allows_and_both_ways_to_set_up_keep_to_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pins = re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    pinned = {canonicalize_name(name): version for name, version in pins}
    for each in map(Requirement, [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]):
        assert each.specifier.contains(pinned[canonicalize_name(each.name)]), each
    assert {"transformers", "tokenizers", "safetensors", "sentencepiece"} <= set(pinned)  # what mlx-lm loads with
    script = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    installs = re.findall(r"^.*pip install.*--editable.*$", script, re.MULTILINE)
    assert len(installs) == 2 and all("--constraint constraints.txt" in line for line in installs)
