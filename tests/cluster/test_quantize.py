"""`brigade quantize` as a process: killed, continued, and run by the cluster."""

import signal
import time
from pathlib import Path

from tests.cluster.commands import answer_here, run_here
from tests.cluster.models import reconfigured_copy
from tests.cluster.processes import Starter


def test_a_quantised_copy_is_whole_after_a_kill_and_answers(start: Starter, tmp_path: Path) -> None:
    asked, whole, out = ("quantize", "demo"), tmp_path / "whole", tmp_path / "out"
    options = ("--q-bits", "8", "--keep", "lm_head,embed_tokens,mlp")
    outcome = run_here(*asked, whole, *options)
    assert outcome.code == 0 and "bits per weight" in outcome.err and not outcome.out
    killed = start.brigade(*asked, out, *options)
    part = out / "model.safetensors.part"
    while not (part.exists() and part.stat().st_size > 3_500_000):  # of 12 MB, 4.2 MB of them buffered at most
        assert killed.is_running
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    other = run_here(*asked, out, "--q-bits", "4")
    assert other.code == 2 and "another conversion" in other.err
    assert run_here(*asked, out, *options).code == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
    short = reconfigured_copy(out, tmp_path / "short", max_position_embeddings=32)  # warms up with as few rows
    found = answer_here("What is the capital of Chile?", "--local", "0", "--model", short, "--temp", "0")
    assert "Santiago" in found["text"]
