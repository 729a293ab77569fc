"""Figures of the pages that follow from the code are those that the code makes now."""

import json
import re
from pathlib import Path

import pytest

from coordinator.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
HOW_IT_WORKS = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")


def found_in(page: str, pattern: str) -> list[float]:
    """The numbers that the groups of this pattern find, wherever the page breaks its lines."""
    found = re.search(pattern, " ".join(page.split()))
    assert found, f"the page says nothing like {pattern}"
    return [float(number) for number in found.groups()]


def test_a_forecast_makes_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's own command, with the rows of the published sweep and with free ones."""
    pattern = r"would make ([\d.]+) tok/s of one request, and (\d+) of eight .* `--row-ms 0` it would be (\d+)"
    one, eight, free = found_in(HOW_IT_WORKS, pattern)
    [command] = re.findall(r"`brigade (plan --simulate --stage-ms [^`]*)`", HOW_IT_WORKS)
    rates = {}
    for flags in ((), ("--row-ms", "0")):
        app([*command.split(), "--json", "--concurrency", "1,8", *flags], standalone_mode=False)
        rates[flags] = [each["tokens_per_s"] for each in json.loads(capsys.readouterr().out)["simulated"]]
    assert rates[()] == pytest.approx([one, eight], abs=0.5)
    assert rates["--row-ms", "0"] == pytest.approx([one, free], abs=0.5)
