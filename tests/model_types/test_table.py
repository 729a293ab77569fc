"""The table of docs/models.md is what this code and this mlx-lm show, row by row; all of it in `tools.models_table`.

CI installs the mlx-lm of constraints.txt. With another one rows may differ: `python -m tools.models_table --compare`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.figures import load
from tools.model_types.configs import all_types
from tools.model_types.matrix import best_lanes, bf16, int8_of, look_at, quantisations, rotating_of
from tools.model_types.quantised import FAMILIES
from tools.model_types.report import Survey, to_markdown
from tools.model_types.row import EQUAL, MISSING

DOCS = Path(__file__).parents[2] / "docs"
SURVEY = load(Survey, DOCS / "models.json")
ROWS = {row.type: row for row in SURVEY.rows}
FITTING = [row.type for row in SURVEY.rows if row.is_cut]
WANTED = (
    "qwen3_moe", "glm4_moe", "minimax", "gpt_oss", "qwen3_5_moe", "qwen3_next", "step3p5", "llama", "deepseek_v3",
    "kimi_k25", "gemma3", "mistral3",
)  # fmt: skip
# dense, latent attention with experts, windows with sinks, chunks, recurrent, hybrid, several caches in a layer
SAMPLE = {"llama", "deepseek_v3", "gpt_oss", "llama4", "mamba2", "qwen3_next", "falcon_h1", "minimax_m3_vl"}
CACHED = {"gpt_oss", "falcon_h1"}  # of SAMPLE, where other caches and lanes are tried
COVERING = {  # each way of quantising once
    "qwen3_moe": ("4 bit", "mixed per tensor", "mxfp4"),
    "deepseek_v3": ("fp8, scale per block",),
    "gpt_oss": ("mxfp4 as published",),
}


def sampled(names: Iterable[str], sample: set[str] = SAMPLE) -> list[Any]:
    """Return one parameter per type; those that are not in the sample run under the mark `matrix`."""
    return [pytest.param(name, marks=[] if name in sample else pytest.mark.matrix) for name in names]


@pytest.mark.parametrize("name", sampled(ROWS))
def test_every_boundary_of_a_type_is_as_the_table_says(name: str) -> None:
    """Logits of a prompt and three steps through stages of one layer, cuts and lanes, in float32."""
    expected, found = ROWS[name], look_at(name)
    if expected.is_missing or found.is_missing:  # another machine, with Metal or without, runs other types
        return
    assert found.fits.partition(": ")[0] == expected.fits.partition(": ")[0], found.fits  # reasons may be worded anew
    assert (found.caches, found.cut, found.lanes, found.calls) == (
        expected.caches, expected.cut, expected.lanes, expected.calls
    )  # fmt: skip


def test_the_table_has_all_types_of_this_mlx_lm_and_shows_nothing_that_is_wrong() -> None:
    """A type fits, or is refused with a reason; nothing breaks, and nothing is off."""
    assert set(ROWS) == set(all_types()) and set(WANTED) <= set(FITTING)
    for row in SURVEY.rows:
        assert row.is_cut or row.fits.startswith(("no: ", MISSING)), row
        if row.is_cut:
            known = row.cut in ("any", "last", "no") and row.lanes in ("rows", "batch", "alone")
            assert row.bf16 == EQUAL and known, row
            assert all(found == "y" or found.startswith("no: ") for found in (row.int8, row.rotating)), row
    for row in (ROWS[name] for name in FAMILIES):
        assert all(found == EQUAL or found.startswith(MISSING) for found in row.quantised.values()), row
    assert (DOCS / "models.md").read_text(encoding="utf-8") == to_markdown(SURVEY)


@pytest.mark.parametrize(
    ("name", "titles"),
    [*COVERING.items(), *(pytest.param(name, (), marks=pytest.mark.matrix, id=f"{name}-all") for name in FAMILIES)],
)
def test_quantised_models_are_the_whole_ones_at_every_boundary(name: str, titles: Sequence[str]) -> None:
    expected = {title: found for title, found in ROWS[name].quantised.items() if not titles or title in titles}
    assert len(expected) >= len(titles) and quantisations(name, expected) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", [row.type for row in SURVEY.rows if not row.is_cut])
def test_what_the_table_says_against_a_type_is_what_is_found(name: str) -> None:
    assert ROWS[name].is_missing or look_at(name).fits == ROWS[name].fits


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(FITTING, CACHED))
def test_bfloat16_lanes_and_other_caches_of_a_type_are_as_the_table_says(name: str) -> None:
    row = ROWS[name]
    assert (bf16(name), best_lanes(name)) == (row.bf16, row.lanes)
    assert (int8_of(name), rotating_of(name)) == (row.int8, row.rotating)
