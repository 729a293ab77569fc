"""Block diffusion over real processes: the tokens of one process, by a command and over HTTP."""

import json
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.cluster.commands import answer_here
from tests.cluster.models import VOCAB, make_refiner, make_talker
from tests.cluster.processes import START_S, Starter, write_cluster
from tests.cluster.servers import Server, start_server

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
    assert here["stats"]["prompt_tokens_per_s"] is None, "its first tokens come after several steps"
    assert other["stats"]["prompt_tokens_per_s"] > 0

    server = start_server(start, denoiser, "--local", "0")
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 13, "ignore_eos": True, "seed": 3, "temperature": 0.8}
    for more in ({}, {"decode": "canvas", "canvas_sampler": "confidence"}):
        assert server.post("/v1/completions", **body, **more).json()["choices"][0]["text"] == here["text"]
    for refused in ({"decode": "ar"}, {"logprobs": 1}, {"canvas_threshold": "high"}, {"canvas": 5}):
        answer = server.post("/v1/completions", **body, **refused)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(refused)))


def test_diffusion_gemma_over_the_three_processes_of_a_server_answers_as_one_and_over_a_lost_worker(
    start: Starter, tmp_path: Path
) -> None:
    refiner = make_refiner(tmp_path / "refiner")
    server = start_server(start, refiner, "--local", "2", "--layers", "2,1,3")
    sampled = ("--raw", "--max-tokens", "40", "--seed", "3", "--temp", "0.8", "--ignore-eos", "--canvas-steps", "5")
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "temperature": 0.8, "ignore_eos": True}
    for sampler, conditioning in (("entropy", "exact"), ("confidence", "top-64")):
        flags = (PROMPT, *sampled, "--canvas-sampler", sampler, "--conditioning", conditioning)
        here = answer_here(*flags, "--model", refiner, "--local", "0")
        assert len(here["tokens"]) == 40
        body |= {"canvas_steps": 5, "canvas_sampler": sampler, "conditioning": conditioning}
        assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == here["text"]

    [worker] = [child for child in start.children(server.running, 3) if "worker-2" in child.cmdline()]
    body["max_tokens"] = 96  # or the answer might be over before the worker is lost
    expected = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    found, stats = "", {}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60.0) as stream:
        for line in (line for line in stream.iter_lines() if line.startswith("data: {")):
            if not found:
                lose_amid_canvas(server, worker)
            chunk = json.loads(line.removeprefix("data: "))
            found += "".join(choice["text"] for choice in chunk["choices"])
            stats |= chunk.get("brigade") or {}
    assert found == expected and stats["recoveries"] >= 1


def lose_amid_canvas(server: Server, worker: psutil.Process) -> None:
    """Kill a worker two steps from now, of the five that a canvas takes."""
    until, deadline = server.status(worker).step + 2, time.monotonic() + START_S
    while server.status(worker).step < until:
        assert time.monotonic() < deadline
    worker.kill()
