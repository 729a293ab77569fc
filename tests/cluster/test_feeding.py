"""A worker process without the model, killed while it is sent its layers: its successor goes on where it was."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.models import make_talker
from tests.cluster.processes import FINISH_S, START_S, Starter, free_port
from tests.integration.conftest import Whole
from tools.proxy import proxy_to

LAYERS = {"hidden_size": 256, "intermediate_size": 2048}  # of 6.7 MB each
CAME = 8 << 20  # bytes, before the first process is killed
PROMPT = (5, 6, 7)
ASKED = ("--prompt-tokens", "5,6,7", "--max-tokens", "8", "--ignore-eos", "--temp", "0", "--json")


def come_of(folder: Path) -> int:
    """Bytes that the worker's disk has."""
    return sum(path.stat().st_size for path in folder.rglob("*-*") if path.is_file())


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_is_fed_is_fed_on_once_it_is_there_again(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, port = make_talker(tmp_path / "model", **LAYERS), free_port()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    worker = start.worker("mini", "--bind", f"127.0.0.1:{port}")
    assert worker.address
    with proxy_to(worker.address) as proxy:
        proxy.there.bytes_per_s = 10e6
        config = tmp_path / "cluster.yaml"
        workers = f"workers: [{{name: mini, address: '{proxy.address}'}}]"
        config.write_text(f"coordinator: {{memory: 16MiB}}\nlayers: [1, 3]\n{workers}\n")
        asking = start.brigade("generate", "--config", config, "--model", model, *ASKED)
        began = time.monotonic()
        while come_of(tmp_path / "cache") < CAME:
            assert time.monotonic() - began < START_S, asking.err.text
            time.sleep(0.02)
        worker.send_signal(signal.SIGKILL)
        worker.running.wait()
        proxy.there.bytes_per_s = None
        again = start.worker("mini", "--bind", f"127.0.0.1:{port}")
        outcome = asking.wait(FINISH_S)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["tokens"] == Whole(model).tokens(PROMPT, 8)
    assert [(stage["node"], stage["end"]) for stage in found["stages"]] == [("coordinator", 1), ("mini", 4)]
    told = again.running.err.text
    assert re.search(r"loaded layers \[1, 4\)", told)
    [sent] = re.findall(r"was sent ([\d.]+) MiB of layers \[1, 4\)", told)
    assert float(sent) <= (come_of(tmp_path / "cache") - CAME) / 2**20 + 0.05, "what had come before is not sent again"
