"""CI installs what was tested: no new version of a package can break it from one day to the next."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINNED = {
    canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
}


def test_every_requirement_is_pinned_to_one_version_that_it_allows() -> None:
    assert all(re.fullmatch(r"[\w.]+", version) for version in PINNED.values())
    for each in map(Requirement, [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]):
        assert each.specifier.contains(PINNED[canonicalize_name(each.name)]), each
    assert {"transformers", "tokenizers", "safetensors", "sentencepiece"} <= set(PINNED)  # what mlx-lm loads with


def test_both_ways_to_set_up_keep_to_it() -> None:
    script = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    installs = re.findall(r"^.*pip install.*--editable.*$", script, re.M)
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in line for line in installs)
