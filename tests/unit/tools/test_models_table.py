"""How the rows of model types are laid out and compared."""

from dataclasses import replace
from pathlib import Path

from tools.model_types.report import Survey, differences, load, to_markdown
from tools.model_types.row import Row

LONG = "no: its attention adds up what it should not add up"
FITS = Row("llama", "=", "=", "kv", "any", "rows", "y", "y", {"4 bit": "=", "mxfp4": LONG})
OUT = Row("afm7", "no: its layers are in two lists", caches="kv")
ELSEWHERE = Row("olmo", "not in mlx-lm: ValueError: no")
SURVEY = Survey("a machine", {"device": "cpu", "mlx-lm": "1.0", "mlx": "2.0"}, [OUT, FITS, ELSEWHERE])


def test_the_page_has_what_fits_what_does_not_and_each_long_reason_once() -> None:
    page = to_markdown(SURVEY)
    assert "with mlx-lm 1.0, mlx 2.0, on a machine." in page
    assert "1 of the 2 that mlx-lm itself runs here fit." in page
    runs, out = page.partition("## What does not")[::2]
    assert "`llama`" in runs and "`afm7`" not in runs
    assert "`afm7`" in out and "its layers are in two lists" in out
    assert page.count("adds up") == 1 and "mxfp4: no (1) `llama`" in page


def test_what_is_saved_is_loaded_and_has_no_differences(tmp_path: Path) -> None:
    SURVEY.save(tmp_path / "rows.json")
    assert load(tmp_path / "rows.json") == SURVEY
    assert differences(SURVEY, SURVEY) == "all 3 rows are the same"


def test_each_difference_is_a_line_with_both_versions() -> None:
    other_bits = replace(FITS, quantised={"4 bit": "≈"})
    for changed, line in (
        (Row("llama", "no: x"), ("llama", "fits", "=", "no: x")),
        (other_bits, ("llama", "quantised 4 bit", "=", "≈")),
        (Row("gpt2", "="), ("gpt2", "type", "", "there")),
    ):
        told = differences(Survey("another", {"mlx-lm": "1.1"}, [OUT, changed, ELSEWHERE]), SURVEY)
        lines = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in told.splitlines()]
        assert lines[0] == ("type", "what", "mlx-lm 1.0, mlx 2.0", "mlx-lm 1.1") and line in lines
