"""How the rows of model types are laid out and compared."""

from dataclasses import replace
from pathlib import Path

from tools.figures import load, save
from tools.model_types.report import Survey, differences
from tools.model_types.row import Row

LONG = "no: its attention adds up what it should not add up"
FITS = Row("llama", "=", "=", "kv", "any", "rows", "y", "y", {"4 bit": "=", "mxfp4": LONG})
OUT = Row("afm7", "no: its layers are in two lists", caches="kv")
ELSEWHERE = Row("olmo", "not in mlx-lm: ValueError: no")
SURVEY = Survey("a machine", {"device": "cpu", "mlx-lm": "1.0", "mlx": "2.0"}, [OUT, FITS, ELSEWHERE])


def test_each_difference_from_a_saved_survey_is_a_line_with_both_versions(tmp_path: Path) -> None:
    save(SURVEY, tmp_path / "rows.json")
    saved = load(Survey, tmp_path / "rows.json")
    assert saved == SURVEY and differences(SURVEY, saved) == "all 3 rows are the same"
    for changed, line in (
        (Row("llama", "no: x"), ("llama", "fits", "=", "no: x")),
        (replace(FITS, quantised={"4 bit": "≈"}), ("llama", "quantised 4 bit", "=", "≈")),
        (Row("gpt2", "="), ("gpt2", "type", "", "there")),
    ):
        told = differences(Survey("another", {"mlx-lm": "1.1"}, [OUT, changed, ELSEWHERE]), saved)
        lines = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in told.splitlines()]
        assert lines[0] == ("type", "what", "mlx-lm 1.0, mlx 2.0", "mlx-lm 1.1") and line in lines
