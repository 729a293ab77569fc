"""Figures of README and the pages are those that the code makes, and those of the pages and files they come from."""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from coordinator.bench.forecast import PUBLISHED_GBPS
from coordinator.cli.app import app
from coordinator.decoding.decode import Decode
from coordinator.decoding.window import mask_count
from protos.brigade_pb2 import CACHE_INT8, Cache
from tools.plot_latency import Curves
from tools.windows_data import Measured
from worker.model.cachespec import Memory, cache_spec

DOCS = Path(__file__).resolve().parents[2] / "docs"
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
HOW_IT_WORKS, OVERHEAD, BENCH, WINDOWS, GPU = (
    (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("how_it_works", "overhead", "bench", "windows", "gpu")
)


def data(name: str) -> Any:
    return json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))


def cells(page: str, first: str) -> list[str]:
    """The others of the table's row that begins with this cell."""
    [row] = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def numbers_beside(page: str, text: str) -> list[float]:
    """The numbers of the paragraphs with this text."""
    found = [paragraph for paragraph in page.split("\n\n") if text in paragraph]
    assert found, f"the page has no {text}"
    return numbers(" ".join(found))


def test_a_forecast_makes_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The page's own command, with the rows of the published sweep and with free ones."""
    said = numbers_beside(HOW_IT_WORKS, "`brigade plan --simulate --stage-ms")
    [command] = re.findall(r"`brigade (plan --simulate --stage-ms [^`]*)`", HOW_IT_WORKS)
    rates = {}
    for flags in ((), ("--row-ms", "0")):
        app([*command.split(), "--json", "--concurrency", "1,8", *flags], standalone_mode=False)
        rates[flags] = [each["tokens_per_s"] for each in json.loads(capsys.readouterr().out)["simulated"]]
    for rate in (*rates[()], *rates["--row-ms", "0"]):
        assert any(number == pytest.approx(rate, abs=0.5) for number in said), rate


def test_the_published_sweep_is_the_one_that_forecasts_take() -> None:
    text = " ".join(BENCH.split())
    [gbps], [rows] = (
        re.findall(pattern, text) for pattern in (r"2026\): ([\d, and]+) GB/s", r"GB/s with ([\d, and]+) rows")
    )
    assert dict(zip(numbers(rows.replace(",", " ")), numbers(gbps.replace(",", " ")), strict=True)) == PUBLISHED_GBPS


def test_one_request_is_as_fast_as_the_page_of_overheads_says() -> None:
    one_ms, two_ms = (
        numbers(cells(OVERHEAD, f"{what}, per token")[0])[0] for what in ("one process", "two nodes [4, 4]")
    )
    said = numbers_beside(README, "(docs/overhead.md)")
    assert {round(1e3 / two_ms), round(1e3 / one_ms), round(two_ms - one_ms, 1)} <= set(said)
    prompts = [
        numbers(cells(OVERHEAD, f"prompt of 1,024 tokens, {what}")[0])[0] for what in ("one process", "two nodes")
    ]
    assert {round(prompt, 1) for prompt in prompts} <= set(numbers_beside(README, "a prompt of 1,024 tokens"))


@pytest.mark.parametrize(
    ("row", "after"),
    [
        ("[two CPU cores](docs/bench.md), the bundled model", BENCH),
        ("[two H200](docs/gpu.md), 24 layers x 4,096, bf16", GPU.partition("## Two GPUs")[2]),
    ],
    ids=["cpu", "gpu"],
)
def test_eight_requests_are_as_fast_as_the_benchmarks_pages_say(row: str, after: str) -> None:
    """Tokens per second of all; the busiest stage in percent."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in after.splitlines() if line.startswith("| ")]
    found = {line[0].split(" ")[0]: line for line in reversed(lines) if line[1:3] == ["ar", "8"]}  # the first of each
    measured = [numbers(found[system][5])[0] for system in ("cluster", "one", "mlx_lm")]
    *rates, busy = (numbers(cell)[0] for cell in cells(README, row))
    assert rates == pytest.approx(measured, abs=0.51) and busy == max(numbers(found["cluster"][8]))


@pytest.mark.parametrize(("sizes", "place"), [((64, 128, 256), 0), ((32, 96, 160), 1)])
def test_int8_caches_take_the_part_of_the_bytes_that_is_said(sizes: tuple[int, ...], place: int) -> None:
    said = [number for number in numbers_beside(HOW_IT_WORKS, "`--kv int8`") if 0.5 < number < 1]
    for size in sizes:
        memory = Memory(None, 8, size, size, 2)
        small, full = (cache_spec(memory, cache).nbytes(memory, 4096) for cache in (Cache(kind=CACHE_INT8), Cache()))
        assert small / full == pytest.approx(said[place], abs=0.005)


def test_windows_yield_what_was_measured_and_have_twice_as_many_rows() -> None:
    measured = Measured.from_json(data("windows"))
    per_step = measured.mean(("diffusion", 16, None), lambda score: score.tokens_per_step)
    assert round(per_step, 1) in numbers_beside(README, "the bundled model's templates")
    assert 16 + mask_count(16, 16) == 32
    rule, said = Decode("diffusion-fast"), numbers_beside(WINDOWS, "W = 16. A MASK is filled")
    assert {rule.entropy_threshold, rule.position_penalty} <= set(said)


def test_wider_windows_win_where_the_page_says() -> None:
    """Tokens per second of W = 32 against 16, by kind and delay."""
    measured = Measured.from_json(data("windows"))

    def gain(kind: str, delay_ms: float) -> float:
        wide, usual = (measured.tokens_per_s(kind, "diffusion", window, delay_ms) for window in (32, 16))
        return wide / usual

    assert min(gain(kind, 60) for kind in ("arithmetic", "story")) > 1.1
    assert max(gain(kind, delay_ms) for kind in ("code", "facts") for delay_ms in (0, 60)) < 1


def test_int8_caches_changed_as_little_as_is_said() -> None:
    rows = data("kv")["rows"]
    by_kv = {kv: [row for row in rows if row["kv"] == kv] for kv in ("full", "int8")}
    equal, asked = (sum(row[key] for row in by_kv["int8"]) for key in ("num_equal", "num_answers"))
    loss = {kv: -mean(row["logprob"] / row["num_scored"] for row in found) for kv, found in by_kv.items()}
    assert {equal, asked, *(round(nats, 4) for nats in loss.values())} <= set(
        numbers_beside(HOW_IT_WORKS, "`python -m tools.eval_kv`")
    )


def test_windows_lose_less_to_slow_hops_and_no_token() -> None:
    points = Curves.from_json(data("latency")).points
    assert all(point.is_equal for point in points)
    rates = {(point.decoder, point.delay_ms): point.tokens_per_s for point in points}
    gains = [rates["diffusion, W = 16", delay] / rates["ar", delay] for delay in (0, 5, 20)]
    assert gains == sorted(gains)
