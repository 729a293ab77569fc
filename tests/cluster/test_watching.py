"""One running server, watched: by its metrics, its state, its log, and its page in a real browser."""

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator import api
from tests.cluster import browser
from tests.cluster.models import make_reciter
from tests.cluster.processes import START_S, Running, Starter

PAGE = Path(api.__file__).with_name("page.html")
HOSTILE = "<h1>xyz"  # what the model says over and over
PROMPT = "wherefore art thou a prompt"
KEY = "open-sesame"
UNLUCKY = """
Object.defineProperty(window, "sessionStorage", { get() { throw new DOMException("blocked") } });
const allowed = AbortSignal.timeout.bind(AbortSignal);
AbortSignal.timeout = (ms) => allowed(ms / 4);
"""
LABELS = {"stage", "worker", "decoder", "finished_reason", "reason", "cause", "state", "le", "key"}


@dataclass(frozen=True)
class Server:
    running: Running
    client: httpx2.Client


@pytest.fixture(scope="module")
def server(module_start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_reciter(tmp_path_factory.mktemp("hostile") / "model", HOSTILE)
    keys = model.parent / "keys"
    keys.write_text(f"# of the readers\nreader {KEY}\n")
    flags = ("--local", "1", "--port", "0", "--served-model-name", "m", "--api-key-file", keys, "--max-tokens", "30000")
    running = module_start.brigade("serve", "--model", model, *flags)
    url = running.err.wait_match(r"serving m at (\S+), up to", START_S)[1]
    with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60.0) as client:
        yield Server(running, client)


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Every sample, by name and the values of its labels but the model's."""
    found = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        labels = dict(sample.labels)
        assert labels.pop("model_name") == "m" and set(labels) <= LABELS and sample.name.startswith("brigade_")
        found[(sample.name.removeprefix("brigade_"), *labels.values())] = sample.value
    return found


def test_metrics_count_every_request_token_and_stage_and_the_log_holds_no_word_of_them(server: Server) -> None:
    usages = []
    for count in (5, 7):
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": count, "decode": "ar"}
        headers = {"x-request-id": f"asked-{count}"}
        usages.append(server.client.post("/v1/chat/completions", json=body, headers=headers).json()["usage"])
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        samples = samples_of(server.client.get("/metrics").text)
        held = {key[1:]: value for key, value in samples.items() if key[0] == "cache_held_bytes"}
        if all(0 < value <= samples["cache_promised_bytes", *stage] for stage, value in held.items()):
            break  # what a worker holds is as it said last, which may be from before the second request
        time.sleep(0.1)
    assert samples["prompt_tokens_total",] == samples["prefix_cache_queries_total",] == prompts > 0
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert samples["prefix_cache_hits_total",] == cached > 0
    assert samples["request_success_total", "length"] == 2
    assert samples["decoder_tokens_total", "ar"] == samples["decoder_steps_total", "ar"] == 12
    assert samples["generation_tokens_total",] == samples["request_generation_tokens_sum",] == 12
    assert samples["inter_token_latency_seconds_count",] == 4 + 6
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert samples[f"{name}_seconds_count",] == samples[f"{name}_seconds_bucket", "+Inf"] == 2
    assert samples["num_requests_running",] == samples["num_requests_waiting",] == 0
    for stage in (("0", "coordinator"), ("1", "worker-1")):
        assert samples["stage_frames_total", *stage] >= 12 and samples["worker_up", stage[1]] == 1
        for name in ("compute", "busy", "bubble", "wire"):
            assert samples[f"stage_{name}_seconds_total", *stage] > 0
        assert 0 < held[stage] <= samples["cache_promised_bytes", *stage] < samples["cache_budget_bytes", *stage]

    log = server.running.err.text
    lines = [json.loads(line) for line in log.splitlines()]
    assert all({"ts", "level", "event", "msg"} <= set(line) for line in lines)
    [ended] = [line for line in lines if line.get("request_id") == "asked-7"]
    assert (ended["event"], ended["finish_reason"], ended["completion_tokens"]) == ("request", "length", 7)
    assert "wherefore" not in log and "<h1>" not in log


def test_the_state_shows_a_request_in_progress(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
    headers = {"x-request-id": "in-progress"}
    with server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()  # kept: without it the answer is given up
        assert any('"content":"<' in line for line in lines)
        state: dict[str, Any] = server.client.get("/cluster").json()
    assert state["standing"]["state"] == "ready"
    nodes = [(node["name"], node["state"], node["stage"]) for node in state["nodes"]]
    assert nodes == [("coordinator", "active", 0), ("worker-1", "active", 1)]
    hops = [(hop["source"], hop["target"]) for hop in state["hops"]]
    assert hops == [("coordinator", "worker-1"), ("worker-1", "coordinator")]
    assert all(hop["sent_bytes"] and hop["latency_ms"] is not None for hop in state["hops"])
    [request] = state["requests"]
    assert (request["id"], request["state"]) == ("in-progress", "running") and request["generated"] > 0
    assert [len(rates) for rates in state["rates"].values()] == [120, 120]


needs_browser = pytest.mark.skipif(
    browser.FOUND is None, reason="no Chromium on this machine: the page is not tried in a browser"
)


@needs_browser
def test_the_page_streams_shows_a_killed_worker_as_lost_and_its_recovery(server: Server, tmp_path: Path) -> None:
    url = str(server.client.base_url).rstrip("/")
    with browser.browsing(tmp_path) as page:
        page.size(1180, 900)
        page.call("Page.addScriptToEvaluateOnNewDocument", source=UNLUCKY)
        page.open(url)
        page.until("document.activeElement.id === 'key'")
        page.write("another-key")
        page.press("Enter", 13, "\r")
        page.until("document.getElementById('why').textContent.endsWith('found another one')")
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
        children = psutil.Process(server.running.process.pid).children(recursive=True)
        next(child for child in children if "worker-1" in child.cmdline()).kill()
        assert page.until("document.querySelector('.node.lost').textContent").startswith("worker-1lost")
        assert page.until("document.querySelector('#recoveries p').textContent").count("worker-1") >= 1
        known = page.run(f"{said}.length")
        page.until(f"{said}.length > {known} && document.querySelectorAll('.node.active').length === 2")
        page.until(f"{said}.length > 400")
        assert page.run("document.querySelectorAll('#answer *').length") < 50  # however long the answer is
        page.run("document.getElementById('stop').focus()")
        page.press("Enter", 13, "\r")
        page.until(f"{said}.endsWith('[stopped]') && document.querySelector('#recent .request')")
        assert page.run("document.activeElement.id") == "send"
        page.press("Enter", 13, "\r")
        page.until("document.querySelector('#requests .request') && document.activeElement.id === 'stop'")
        server.running.send_signal(signal.SIGSTOP)
        try:
            page.until("document.getElementById('state').textContent === 'unreachable'")
            assert page.run("document.querySelector('#requests .request, #chain.busy')") is None
        finally:
            server.running.send_signal(signal.SIGCONT)
        page.until("document.getElementById('state').textContent === 'ready'")
        page.press("Enter", 13, "\r")
        page.size(360, 800)
        assert page.run("document.documentElement.scrollWidth") == 360
        assert {asked.rsplit("/", 1)[0] for asked in page.asked} <= {url, f"{url}/v1/chat"}
        assert not page.complaints


@needs_browser
def test_the_page_shows_a_long_thought_as_a_thought_to_its_end(tmp_path: Path) -> None:
    with browser.browsing(tmp_path) as page:
        page.open(PAGE.as_uri())
        page.until("document.readyState === 'complete' && document.getElementById('answer')")
        for kind in ("thought", "said"):
            page.run(f"for (let n = 0; n < 60; n++) write(document.getElementById('answer'), '{kind}', '{kind[0]}')")
            shown = page.run(f"[...document.querySelectorAll('#answer .{kind}')].map(it => it.textContent).join('')")
            assert shown == 60 * kind[0]
