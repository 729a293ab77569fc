"""Every program of tools/, run with its smallest arguments: it ends well and makes what it promises."""

import ast
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import ROOT, Outcome, starting
from tools import random_model

FINISH_S = 550.0
MATRIX = pytest.mark.matrix  # from 4 seconds of CPU


def program(name: str, arguments: str, *printed: str, codes: tuple[int, ...] = (0,), mark: Any = ()) -> Any:
    """A program with its arguments, in which `@` stands for a folder, and patterns in what it prints."""
    return pytest.param(name, arguments, printed, codes, marks=mark, id=name)


PROGRAMS = [
    program(
        "bench_compile", "@model --tokens 8 --context 4 --capacity 16", r"16 requests  fixed, compiled +\d", mark=MATRIX
    ),
    program("bench_feed", "--layers 1 --rounds 1", r"feeding", mark=MATRIX),
    program("bench_floor", "@model --turns 1 --tokens 16 --prompt 1", r"floor / brigade: \d", mark=MATRIX),
    program("bench_handover", "--prompt 1100 --rounds 1", r"with caches that go along .* tokens equal", mark=MATRIX),
    program("bench_hops", "--delay-ms 0 --workers 1 --max-tokens 1", r"ar .* 4 of 4", mark=MATRIX),
    program("bench_prompts", "--prompt 64 --tokens 2 --rounds 1", r"with two nodes .* answers equal", mark=MATRIX),
    program("bench_restart", "--rounds 1 --local 0 --prompt 1100", r"after a restart .* answers equal", mark=MATRIX),
    program("bench_turns", "--tokens 700 --local 0", r"of which \d\d fed; .* answers equal", mark=MATRIX),
    program("bench_lanes", "@model --held 8 --turns 1", r"1 to 16 rows, as many in all +\d"),
    program(
        "bench_overhead", "--tokens 2 --prompt 1 --rounds 1", r"overhead per token .* ms", r"a token +\| +161 \| +\d",
        mark=MATRIX,
    ),
    program("bench_ring", "@model --tokens 8 --prompt 1", r'"tokens_per_s": \d', mark=MATRIX),
    program("bench_serve", "--tokens 2 --streams 1 --rounds 1 --words 1", r"one stream, per token: \d", mark=MATRIX),
    program("bench_tls", "--hidden-size 8 --steps 1 --chunks 1", r"\| TLS +\| +15\.0 MiB \| +\d", mark=MATRIX),
    program("check_clients", "llm", r"\| `llm` \| .* (passed|not run)", mark=MATRIX),  # not run without a registry
    program("compare_checkouts", ". . --rounds 1 -- -c print('{\"tokens_per_s\":1}')", r"tokens_per_s .* 1\.000"),
    program("eval_canvas", "--from docs/canvas.json --json @canvas.json --markdown @canvas.md"),
    program("eval_demo", "--limit 1 --probes 1 --json @demo.json", r"\| arithmetic +\| 1 ", mark=MATRIX),
    program(
        "eval_kv", "--conversations 1 --lengths 512 --long-lengths 300 --hidden 128 --rounds 1 --json @kv.json",
        r"\| 300 +\| int4 +\| +\d", mark=MATRIX,
    ),
    program("eval_quantised", "--limit 1 --rounds 1", r"\| 4 bits +\| +\d", mark=MATRIX),
    program(
        "eval_windows", "--limit 1 --wanted 1 --timed 1 --json @windows.json --markdown @windows.md", mark=MATRIX
    ),
    program("faults", "--picture @kill.svg", mark=MATRIX),
    program("fuzz_api", "--cases 1 --streams 1", r"\d+ requests, \d+ streams, 0 failures", mark=MATRIX),
    program("generate_protos", "@"),
    # 1: on a busy machine refusals may come late
    program(
        "load_serve", "--seconds 1 --streams 1 --kills 0 --local 1 --max-tokens 2", r"3 x capacity \(\d",
        codes=(0, 1), mark=MATRIX,
    ),
    program(
        "load_agents", "--agents 2 --turns 2 --instructions 100 --kills 0", r"0 answers differ, all but \d+ tokens",
        mark=MATRIX,
    ),
    program("models_table", "llama --json @types.json", mark=MATRIX),
    program("pages", "", r"page .* committed"),
    program("plan_table", "Llama-3.3-70B", r"\| Llama-3\.3-70B \| +40 \| +80 \|"),
    program(
        "plot_latency", "--rounds 0 --from docs/latency.json --json @latency.json --plot @latency.png", mark=MATRIX
    ),
    program("random_model", "@new --hidden 64 --layers 1 --chats"),
    program("record_diffusion_gemma", "recording --mlx-vlm absent", codes=(2,)),  # mlx-vlm is no dependency
    program("record_drafters", "--list", r"mtp_sidecar\n"),
    program("seeded_faults", "--list", r"\d+ faults: \{'fit': \d+\}"),
    program("simulate_prompts", "--tokens 64 --links none", r"loopback:\n.* answers equal", mark=MATRIX),
    program("soak", "--minutes 0.1", r"\n0 violation", mark=MATRIX),
    program("train_demo", "--out @trained --steps 1 --batch 1 --pool 0.01", r"parameters", mark=MATRIX),
    program("train_drafter", "--out @drafter --steps 1 --batch 1 --anchors 2 --pool 0.01", r"parameters", mark=MATRIX),
    program("verify_gpus", "--json @gpus.json --quick", r"random bf16 .* one process", mark=MATRIX),
]  # fmt: skip
LONG = {each.values[0]: each.values[1] for each in PROGRAMS if each.marks}
ELSEWHERE = {
    "bench_auto": "tests/cluster/test_bench.py",
    "faults/worker": "tests/cluster/test_workers.py",
    "langchain_requests": "tools/check_clients.py",
    "litellm_requests": "tools/check_clients.py",
    "load_sparse": "tests/integration/test_sparse_loading.py",
    "simulated_mac": "tools/simulate_prompts.py",
}


def test_every_program_is_run() -> None:
    def is_program(path: Path) -> bool:
        return any(
            isinstance(node, ast.If) and "__main__" in ast.unparse(node) for node in ast.parse(path.read_text()).body
        )

    found = {path.relative_to(ROOT / "tools") for path in (ROOT / "tools").rglob("*.py") if is_program(path)}
    names = {str(path.parent if path.stem == "__main__" else path.with_suffix("")) for path in found}
    assert names == {each.values[0] for each in PROGRAMS} | ELSEWHERE.keys()
    assert all(name.replace("/", ".") in (ROOT / where).read_text() for name, where in ELSEWHERE.items())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a program in this process, which has imported most of what programs import; returns its exit code."""
    monkeypatch.setattr("worker.platform.run.calls_are_left", lambda: False)  # those of other tests

    def run_here(name: str, *arguments: str) -> int:
        for module in (f"tools.{name}", f"tools.{name}.__main__"):  # that other tests may have imported
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"tools.{name}", run_name="__main__", alter_sys=True)
        return int(ended.value.code or 0)

    return run_here


@pytest.mark.parametrize("name", [name for name, arguments in LONG.items() if arguments])
def test_every_program_that_takes_long_says_what_it_takes(name: str, run: Callable[..., int]) -> None:
    """It is imported and reads its arguments; the mark `matrix` runs it."""
    assert run(name, "--help") == 0


def test_more_tokens_than_the_caches_hold_are_refused(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """MLX would write past the end of their buffers."""
    assert run("bench_compile", "model", "--tokens", "8", "--context", "9", "--capacity", "16") == 2
    assert capsys.readouterr().err == "error: --capacity: expected at least 17, --context + --tokens, got 16\n"


@pytest.mark.timeout(FINISH_S + 10)
@pytest.mark.parametrize(("name", "arguments", "printed", "codes"), PROGRAMS)
def test_it_ends_well_and_makes_what_it_promises(
    name: str,
    arguments: str,
    printed: tuple[str, ...],
    codes: tuple[int, ...],
    tmp_path: Path,
    run: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    if "@model" in arguments:
        random_model.main(tmp_path / "model", hidden=64, layers=2, vocab=64, context=256)
    given = [word.replace("@", f"{tmp_path}/") for word in arguments.split()]
    if name in LONG:
        with starting() as start:
            outcome = start.python("-m", f"tools.{name}", *given).wait(FINISH_S)
    else:
        outcome = Outcome(run(name, *given), *capfd.readouterr())
    assert outcome.code in codes, outcome.err
    for pattern in printed:
        assert re.search(pattern, outcome.out), outcome.out
    for path in (Path(word) for word in given if word.startswith(str(tmp_path))):
        assert any(path.iterdir()) if path.is_dir() else path.stat().st_size
        if path.suffix == ".json":
            json.loads(path.read_text())
