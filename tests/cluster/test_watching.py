"""One running server, watched in every way there is: metrics, state, terminal, log, and the page in a real browser."""

import io
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from coordinator.cli.app import app
from coordinator.cli.status import ask_server, tables
from tests.cluster import browser
from tests.cluster.models import make_reciter
from tests.cluster.processes import START_S, Running, Starter, write_cluster
from tools.worker_process import free_port
from worker.errors import ServerFailed

HOSTILE = "<h1>xyz"  # what the model says over and over
PROMPT = "wherefore art thou a prompt"
KEY = "open-sesame"
BEARER = {"authorization": f"Bearer {KEY}"}
LABELS = {"stage", "worker", "decoder", "finished_reason", "reason", "cause", "state", "le", "key"}


@dataclass(frozen=True)
class Server:
    running: Running
    url: str
    keys: Path

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", headers=BEARER, timeout=30.0)

    def ask(self, max_tokens: int) -> Any:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": max_tokens, "decode": "ar"}
        headers = BEARER | {"x-request-id": f"asked-{max_tokens}"}
        return httpx2.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60.0).json()


@pytest.fixture(scope="module")
def server(module_start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_reciter(tmp_path_factory.mktemp("hostile") / "model", HOSTILE)
    keys = model.parent / "keys"
    keys.write_text(f"# of the readers\nreader {KEY}\n")
    flags = ("--local", "1", "--port", "0", "--served-model-name", "m", "--api-key-file", keys, "--max-tokens", "30000")
    running = module_start.brigade("serve", "--model", model, *flags)
    yield Server(running, running.err.wait_match(r"serving m at (\S+), up to", START_S)[1], keys)


@pytest.fixture(scope="module")
def samples(server: Server) -> dict[tuple[str, ...], float]:
    """Every sample after two requests, by name and the values of its labels but the model's."""
    usages = [server.ask(count)["usage"] for count in (5, 7)]
    found = {("usage", key): float(sum(usage[key] for usage in usages)) for key in ("prompt_tokens",)}
    found["usage", "cached"] = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for family in text_string_to_metric_families(server.get("/metrics").text):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "m" and sample.name.startswith("brigade_")
                assert set(labels) <= {
                    "stage",
                    "worker",
                    "decoder",
                    "finished_reason",
                    "reason",
                    "cause",
                    "state",
                    "le",
                    "key",
                }
                found[(sample.name.removeprefix("brigade_"), *labels.values())] = sample.value
        held = {key[1:]: value for key, value in found.items() if key[0] == "cache_held_bytes"}
        if all(0 < value <= found["cache_promised_bytes", *stage] for stage, value in held.items()):
            break  # what a worker holds is as it said last, which may be from before the second request
        time.sleep(0.1)
    return found


def test_metrics_count_every_request_and_token(samples: dict[tuple[str, ...], float]) -> None:
    assert samples["generation_tokens_total",] == 12
    assert samples["prompt_tokens_total",] == samples["usage", "prompt_tokens"] > 0
    assert samples["prefix_cache_queries_total",] == samples["usage", "prompt_tokens"]
    assert samples["prefix_cache_hits_total",] == samples["usage", "cached"] > 0
    assert samples["request_success_total", "length"] == 2
    assert samples["decoder_tokens_total", "ar"] == samples["decoder_steps_total", "ar"] == 12
    assert samples["inter_token_latency_seconds_count",] == 4 + 6
    assert samples["request_generation_tokens_sum",] == 12
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert samples[f"{name}_seconds_count",] == samples[f"{name}_seconds_bucket", "+Inf"] == 2
    assert samples["num_requests_running",] == samples["num_requests_waiting",] == 0


def test_metrics_tell_of_every_stage(samples: dict[tuple[str, ...], float]) -> None:
    for stage, worker in (("0", "coordinator"), ("1", "worker-1")):
        assert samples["stage_frames_total", stage, worker] >= 12
        for name in ("compute", "busy", "bubble", "wire"):
            assert samples[f"stage_{name}_seconds_total", stage, worker] > 0
        held = samples["cache_held_bytes", stage, worker]
        assert 0 < held <= samples["cache_promised_bytes", stage, worker] < samples["cache_budget_bytes", stage, worker]
        assert samples["worker_up", worker] == 1


FIELDS = {  # of the state, by where they stand; a value with "?" may be None
    "": "model:dict standing:dict uptime_s:float epoch:int nodes:list hops:list requests:list recent:list "
    "recoveries:list totals:dict rates:dict",
    "nodes": "name:str state:str address:str stage:int? start:int end:int memory_bytes:int weight_bytes:int "
    "cache_promised_bytes:int cache_budget_bytes:int cache_held_bytes:int? peak_memory_bytes:int? "
    "active_memory_bytes:int? cached_memory_bytes:int? utilisation:float sent_bytes:int? slots:int?",
    "hops": "source:str target:str latency_ms:float? sent_bytes:int?",
    "requests": "id:str prompt_tokens:int generated:int decoder:str state:str age_s:float",
}


def require_fields(state: dict[str, Any]) -> dict[str, Any]:
    for place, fields in FIELDS.items():
        for found in state[place] if place else [state]:
            kinds = dict(field.split(":") for field in fields.split())
            assert found.keys() == kinds.keys()
            for name, kind in kinds.items():
                value, usual = found[name], kind.rstrip("?")
                allowed = (
                    {usual} | ({"NoneType"} if kind != usual else set()) | ({"int"} if usual == "float" else set())
                )
                assert type(value).__name__ in allowed, (place, name, value)
    assert state["standing"].keys() <= {"state", "why"} and state["rates"].keys() == {"tokens_per_s", "tokens_per_step"}
    return state


def test_the_state_has_its_shape_and_shows_a_request_under_way(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
    headers = BEARER | {"x-request-id": "under-way"}
    with httpx2.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()  # kept: without it the answer is given up
        assert any('"content":"<' in line for line in lines)
        state = require_fields(server.get("/cluster").json())
    assert state["standing"]["state"] == "ready"
    nodes = [(node["name"], node["state"], node["stage"]) for node in state["nodes"]]
    assert nodes == [("coordinator", "active", 0), ("worker-1", "active", 1)]
    hops = [(hop["source"], hop["target"]) for hop in state["hops"]]
    assert hops == [("coordinator", "worker-1"), ("worker-1", "coordinator")]
    assert all(hop["sent_bytes"] and hop["latency_ms"] is not None for hop in state["hops"])
    [request] = state["requests"]
    assert (request["id"], request["state"]) == ("under-way", "running") and request["generated"] > 0
    assert [len(rates) for rates in state["rates"].values()] == [120, 120]


def test_status_shows_it_in_60_columns(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(tables(ask_server(server.url, KEY)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 60 and not any(line.rstrip().endswith("…") for line in lines)
    app(["status", "--server", server.url, "--api-key-file", str(server.keys), "--json"], standalone_mode=False)
    assert require_fields(json.loads(capsys.readouterr().out))["model"]["name"] == "m"


def test_the_log_is_json_lines_without_a_word_of_prompt_or_answer(
    server: Server, samples: dict[tuple[str, ...], float]
) -> None:
    text = server.running.err.text
    assert not [line for line in text.splitlines() if not line.startswith("{")]
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"ts", "level", "event", "msg"} <= set(line) for line in lines)
    [ended] = [line for line in lines if line.get("request_id") == "asked-7"]
    assert (ended["event"], ended["finish_reason"], ended["completion_tokens"]) == ("request", "length", 7)
    assert "wherefore" not in text and "<h1>" not in text


@pytest.mark.skipif(browser.FOUND is None, reason="no Chromium on this machine: the page is not tried in a browser")
def test_the_page_streams_shows_a_killed_worker_as_lost_and_its_recovery(server: Server, tmp_path: Path) -> None:
    with browser.browsing(tmp_path) as page:
        page.size(1180, 900)
        page.open(server.url)
        page.until("document.activeElement.id === 'key'")
        page.write(KEY)
        page.press("Enter", 13, "\r")
        page.until("document.querySelectorAll('.node.active').length === 2")
        page.until("document.title === 'm · Brigade'")
        page.run("document.getElementById('prompt').focus()")
        page.write(PROMPT)
        page.press("Enter", 13, "\r")
        said = "document.getElementById('answer').textContent"
        page.until(f"{said}.startsWith('<h1>xyz<h1>')")
        assert page.run("document.querySelectorAll('#answer h1').length") == 0  # what a model says is no markup
        page.until("document.querySelector('#requests .request')")
        worker_of(server).kill()
        assert page.until("document.querySelector('.node.lost').textContent").startswith("worker-1lost")
        assert page.until("document.querySelector('#recoveries p').textContent").count("worker-1") >= 1
        known = page.run(f"{said}.length")
        page.until(f"{said}.length > {known} && document.querySelectorAll('.node.active').length === 2")
        page.until(f"{said}.length > 1000")
        assert page.run("document.querySelectorAll('#answer *').length") < 50  # however long the answer is
        page.run("document.getElementById('stop').click()")
        page.until(f"{said}.endsWith('[stopped]') && document.querySelector('#recent .request')")
        page.size(360, 800)
        assert page.run("document.documentElement.scrollWidth") == 360
        assert {url.rsplit("/", 1)[0] for url in page.asked} <= {server.url, f"{server.url}/v1/chat"}
        assert not page.complaints


def worker_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.running.process.pid).children(recursive=True)
    return next(child for child in children if "worker-1" in child.cmdline())


def test_without_a_server_status_says_what_each_worker_holds(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [address] = [node["address"] for node in server.get("/cluster").json()["nodes"] if node["stage"]]
    config = write_cluster(tmp_path / "cluster.yaml", ("worker-1", address), ("away", f"127.0.0.1:{free_port()}"))
    nobody = f"http://127.0.0.1:{free_port()}"
    app(["status", "--server", nobody, "--config", str(config), "--json"], standalone_mode=False)
    held, away = json.loads(capsys.readouterr().out)["nodes"]
    assert (held["name"], away["name"], away["state"]) == ("worker-1", "away", "lost")
    assert held["weight_bytes"] > 0 and "nothing answers" in away["why"]
    with pytest.raises(ServerFailed, match="nothing answers at"):
        app(["status", "--server", nobody], standalone_mode=False)
