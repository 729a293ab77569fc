"""Block diffusion over real processes: the tokens of one process, by a command and over HTTP."""

from pathlib import Path
from typing import Any

from tests.cluster.commands import answer_here
from tests.cluster.models import VOCAB, make_talker
from tests.cluster.processes import Starter, write_cluster
from tests.cluster.servers import start_server

PROMPT = "Hello"


def test_canvases_over_three_processes_are_those_of_one_and_of_the_server(start: Starter, tmp_path: Path) -> None:
    denoiser = make_talker(tmp_path / "denoiser", model_type="sdar", mask_token_id=VOCAB - 1)
    nodes = [(each.name, each.address) for each in (start.worker(n, "--model", denoiser) for n in ("mini", "air"))]
    config = write_cluster(tmp_path / "cluster.yaml", *nodes, model=str(denoiser), layers="[1, 1, 2]")
    flags = (PROMPT, "--raw", "--max-tokens", "13", "--seed", "3", "--temp", "0.8", "--ignore-eos")
    here = answer_here(*flags, "--model", denoiser, "--local", "0")
    there = answer_here(*flags, "--config", config, "--decode", "canvas", "--canvas", "4")
    assert there["tokens"] == here["tokens"] and len(here["tokens"]) == 13
    assert there["stats"]["steps"] == here["stats"]["steps"] > 0
    other = answer_here(*flags, "--model", denoiser, "--local", "0", "--canvas-steps", "1")
    assert other["tokens"] != here["tokens"] and other["stats"]["steps"] < here["stats"]["steps"]

    server = start_server(start, denoiser, "--local", "0")
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 13, "ignore_eos": True, "seed": 3, "temperature": 0.8}
    for more in ({}, {"decode": "canvas", "canvas_sampler": "confidence"}):
        assert server.post("/v1/completions", **body, **more).json()["choices"][0]["text"] == here["text"]
    for refused in ({"decode": "ar"}, {"logprobs": 1}, {"canvas_threshold": "high"}, {"canvas": 5}):
        answer = server.post("/v1/completions", **body, **refused)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(refused)))
