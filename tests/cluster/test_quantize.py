"""`brigade quantize` as a process: killed, continued, and run by the cluster."""

import signal
from pathlib import Path

import pytest

from tests.cluster.commands import answer_here, run_here
from tests.cluster.models import reconfigured_copy
from tests.cluster.processes import Starter

# The system kills the process at the write that would make a file larger: 12 MB it would be.
KILLED = """
import resource, signal
from coordinator.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, 8_000_000))
main()
"""


@pytest.mark.long
def test_a_quantised_copy_is_whole_after_a_kill_and_answers(start: Starter, tmp_path: Path) -> None:
    asked, whole, out = ("quantize", "demo"), tmp_path / "whole", tmp_path / "out"
    options = ("--q-bits", "8", "--keep", "lm_head,embed_tokens,mlp")
    outcome = run_here(*asked, whole, *options)
    assert outcome.code == 0 and "bits per weight" in outcome.err and not outcome.out
    killed = start.python("-c", KILLED, *asked, out, *options).wait()
    assert killed.code == -signal.SIGXFSZ, killed.err
    assert (out / "model.safetensors.part").stat().st_size == 8_000_000
    other = run_here(*asked, out, "--q-bits", "4")
    assert other.code == 2 and "another conversion" in other.err
    assert run_here(*asked, out, *options).code == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
    short = reconfigured_copy(out, tmp_path / "short", max_position_embeddings=32)  # warms up with as few rows
    found = answer_here("What is the capital of Chile?", "--local", "0", "--model", short, "--temp", "0")
    assert "Santiago" in found["text"]
